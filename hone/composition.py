"""Reading run files: YAML, `defaults:` of one level, `key=value` overrides.

This file returns the layers of a run, lowest priority first, each with its source. `hone.config` merges them and checks
them against the settings classes.

The format is the core of YAML 1.2: `1e-4` is a number; `on`, `off`, `yes`, `no`, dates and `1:30` are text; a duplicate
key is an error.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

COMMAND_LINE = "command line"
_FILE = re.compile(r"(?P<file>[^:\n]+\.(py(?=:)|jinja))(?P<rest>(:[\w.]+)?)")  # file.py:name, or a chat template


class ConfigError(ValueError):
    """An error in a run file, an override or other user input. The message is one line."""


# -------------------------------------------------------------------------------------------------------- YAML


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own attribute)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode):  # such as {{ name }}, meant as a template
                raise yaml.constructor.ConstructorError(
                    None, None, "a key should be text; put a value that begins with {{ in quotes", key_node.start_mark
                )
            if key_node.tag != "tag:yaml.org,2002:merge" and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"duplicate key {key!r}; remove one of the two", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Writes YAML; quotes text that this reader or a YAML 1.1 reader would parse as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Write control characters as escapes: PyYAML loses some of them (NEL) in its other styles."""
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if data.isprintable() else '"')


_PLAIN_SCALARS = [
    ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", "[-+]?(0|[1-9][0-9_]*)|0x[0-9a-fA-F_]+", "-+0123456789"),
    ("float", r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+", "-+.0123456789"),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
    ("null", "~|null|Null|NULL|", "~nN\0"),
    ("merge", "<<", "<"),
]
for _tag, _pattern, _first in _PLAIN_SCALARS:
    for _class in (_Loader, _Dumper):
        _starts = [*_first.replace("\0", ""), *([""] if "\0" in _first else [])]
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _starts)


_Dumper.add_representer(str, _Dumper.represent_str)


def from_yaml(text: str) -> Any:
    """Parse YAML to plain data. Raises yaml.YAMLError for invalid YAML, a duplicate key, or other types."""
    return yaml.load(text, Loader=_Loader)  # a SafeLoader


def to_yaml(data: Any) -> str:
    """Write YAML that `from_yaml` reads back unchanged, one value per line."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**31, default_flow_style=False)


# ------------------------------------------------------------------------------------------------------ layers


PRESET = "preset"  # first word of the source of a preset's layer


class Layer(NamedTuple):
    """The part of one file, the command line or a preset that concerns a run, a section or one value."""

    source: str
    data: Any


def read_layers(path: Path, overrides: Sequence[str] = ()) -> list[Layer]:
    """The layers of a run: the `defaults:` file (if any), the run file, the command line (if any). Later ones win."""
    data = _read_yaml(path)
    layers = [Layer(str(path), data)]
    base_name = data.pop("defaults", None)
    if base_name is not None:
        if not isinstance(base_name, str):
            raise ConfigError(f"{path}: 'defaults' should name one file, found {base_name!r}")
        base_path = path.parent / base_name
        base = _read_yaml(base_path, named_by=f" (named by 'defaults' in {path})")
        if "defaults" in base:
            raise ConfigError(
                f"{base_path}: a file named by 'defaults' cannot have 'defaults' itself; copy those settings into it"
            )
        layers.insert(0, Layer(str(base_path), base))
    if overrides:
        layers.append(Layer(COMMAND_LINE, read_overrides(overrides)))
    return layers


def _read_yaml(path: Path, named_by: str = "") -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"no run file {path}{named_by}{_near_file(path)}")
    try:
        data = from_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or a number out of range
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if not isinstance(data, dict):
        found = "nothing" if data is None else type(data).__name__
        raise ConfigError(f"{path} should contain a mapping (key: value), found {found}")
    placed: dict[str, Any] = _placed(data, path.parent)
    return placed


def _placed(value: Any, folder: Path) -> Any:
    """The settings of a run file in `folder`, in which a Python file or template that lies there has its path.

    So a run file runs from every folder. A file that is not beside it is looked for in the current folder later.
    """
    if isinstance(value, dict):
        return {key: _placed(inner, folder) for key, inner in value.items()}
    if isinstance(value, list):
        return [_placed(inner, folder) for inner in value]
    found = _FILE.fullmatch(value) if isinstance(value, str) else None
    if found is None or not (folder / found["file"]).is_file():
        return value
    return os.path.normpath(folder / found["file"]) + found["rest"]


def _near_file(path: Path) -> str:
    around = [*path.parent.glob("*.yaml"), *path.parent.parent.glob("*/*.yaml")]
    near = difflib.get_close_matches(str(path), [str(other) for other in around], n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def read_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Turn `dotted.key=value` items into one nested mapping; values are YAML (`1e-4`, `null`, `[a, b]`, `true`).

    If a key is given twice, the last one wins. A section is set before its keys, in whatever order they were given:
    `loss.clip_low=0.1 loss=ppo` sets both.
    """
    split = [_split(override) for override in overrides]
    tree: dict[str, Any] = {}
    for keys, value in sorted(split, key=lambda pair: len(pair[0])):
        node = tree
        for key in keys[:-1]:
            inner = node.get(key)
            if isinstance(inner, str):  # `loss=ppo` is short for `loss.name=ppo`
                inner = {"name": inner}
            elif not isinstance(inner, dict):
                inner = {}
            node[key] = inner
            node = inner
        node[keys[-1]] = value
    return tree


def _split(override: Any) -> tuple[list[str], Any]:
    if not isinstance(override, str):
        given = [f"{key}={value}" for key, value in override.items()] if isinstance(override, Mapping) else []
        raise ConfigError(
            f"override {override!r} should be text: {', '.join(map(repr, given)) or repr('run.steps=10')}"
        )
    key, separator, text = override.partition("=")
    keys = key.split(".")
    if not separator or not all(keys):
        raise ConfigError(f"override {override!r} should be key=value, such as run.steps=10")
    try:
        return keys, from_yaml(text) if text else ""
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(
            f"override {override!r}: the value is not valid YAML: {' '.join(str(error).split())}"
        ) from error
