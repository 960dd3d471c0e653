"""Run files: frozen settings, composed from YAML and the command line, each value knowing where it came from.

    recipe.yaml  --defaults: base.yaml (one level)-->  merged mapping  --key=value overrides-->  Config tree
                                                             |
                                                        provenance: dotted key -> "default" | file | "command line"

A setting lives in a `Config` subclass beside the code that it configures; its default is written there and nowhere
else. Unknown keys are errors with the nearest valid key. A key that was set but that no part has read by the time the
run starts is an error too: parts read their settings in their constructors, and `Config` keeps note of what was read.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SerializeAsAny, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from hone.registry import CannotLoad, Registry, UnknownName

DEFAULT = "default"
COMMAND_LINE = "command line"


class ConfigError(ValueError):
    """A run file or override that cannot be used; the message is one line for a person."""


class Config(BaseModel):
    """Base of every settings class: frozen, strict about keys, and aware of which of its fields were read."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    _reads: set[str] = PrivateAttr(default_factory=set)

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if not name.startswith("_") and name in type(self).__pydantic_fields__:
            private = super().__getattribute__("__pydantic_private__")
            if private is not None:
                private["_reads"].add(name)
        return value


class Choice(Config):
    """Settings of one named entry of a registry: `loss: {name: ppo, clip_low: 0.2}`, or just `loss: ppo`."""

    name: str = Field(description="which one")


@dataclass(frozen=True, slots=True)
class FromRegistry:
    """Marks a field as a choice among a registry's entries: `Annotated[Choice, FromRegistry(LOSSES)]`."""

    registry: Registry


def setting(default: Any = ..., meaning: str = "", *, unit: str = "", factory: Any = None, **constraints: Any) -> Any:
    """A field with its meaning and unit (for `hone config --explain`); constraints are pydantic's (ge, le, gt ...)."""
    extra = {"unit": unit} if unit else None
    if factory is not None:
        return Field(default_factory=factory, description=meaning, json_schema_extra=extra, **constraints)
    return Field(default, description=meaning, json_schema_extra=extra, **constraints)


C = TypeVar("C", bound=Config)


@dataclass(frozen=True, slots=True)
class Loaded(Generic[C]):
    """A resolved run file: the settings, and for every dotted key what set it."""

    config: C
    provenance: Mapping[str, str]

    def explicit(self) -> list[str]:
        return [key for key, source in self.provenance.items() if source != DEFAULT]


# ----------------------------------------------------------------------------------------------------- loading


def load(cls: type[C], path: str | Path, overrides: list[str] | None = None) -> Loaded[C]:
    """Read a run file, apply `key=value` overrides, and build the settings.

    Raises ConfigError naming the file, the key, the value, what was expected and the nearest valid choice.
    """
    data, sources = read_file(Path(path))
    for override in overrides or []:
        apply_override(data, sources, override)
    config = build(cls, data, source=str(path))
    provenance = {key: _source_of(key, sources) for key, _ in walk(config)}
    forget_reads(config)
    return Loaded(config, provenance)


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The mapping of a YAML file over the one that its `defaults:` names, and which file set which dotted key."""
    data = _read_yaml(path)
    sources: dict[str, str] = {}
    base_name = data.pop("defaults", None)
    merged: dict[str, Any] = {}
    if base_name is not None:
        base_path = path.parent / str(base_name)
        base = _read_yaml(base_path)
        if "defaults" in base:
            raise ConfigError(f"{base_path}: 'defaults' inside a defaults file; composition is one level deep")
        _merge(merged, base, sources, str(base_path))
    _merge(merged, data, sources, str(path))
    return merged, sources


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        siblings = [str(p) for p in path.parent.parent.glob("*/*.yaml")] if path.parent.parent.is_dir() else []
        near = difflib.get_close_matches(str(path), siblings, n=1, cutoff=0.6)
        raise ConfigError(f"no run file {path}" + (f"; did you mean {near[0]}?" if near else ""))
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} should hold a mapping of settings, found {type(data).__name__}")
    return data


def _merge(into: dict[str, Any], new: Mapping[str, Any], sources: dict[str, str], source: str, prefix: str = "") -> None:
    for key, value in new.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping) and isinstance(into.get(key), dict) and not _renames(into[key], value):
            _merge(into[key], value, sources, source, f"{dotted}.")
        elif isinstance(value, Mapping):
            into[key] = {}
            _merge(into[key], value, sources, source, f"{dotted}.")
        else:
            into[key] = value
        sources[dotted] = source


def _renames(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Another `name` is another choice: the settings of the old one do not carry over."""
    return "name" in new and "name" in old and new["name"] != old["name"]


def apply_override(data: dict[str, Any], sources: dict[str, str], override: str) -> None:
    """Set one `dotted.key=value` in a mapping; the value is read as YAML (`1e-4`, `null`, `[a, b]`, `true`)."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override {override!r} should be key=value")
    try:
        value = _scalar(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not valid YAML") from error
    nested: Any = value
    for part in reversed(key.split(".")):
        nested = {part: nested}
    _merge(data, nested, sources, COMMAND_LINE)
    if isinstance(value, str) and key.endswith(".name"):
        sources[key.removesuffix(".name")] = COMMAND_LINE


def _scalar(text: str) -> Any:
    value = yaml.safe_load(text) if text else ""
    if isinstance(value, str):
        try:
            return float(value) if value[:1] in "+-.0123456789" else value  # YAML 1.1 reads 1e-4 as text
        except ValueError:
            return value
    return value


def _source_of(key: str, sources: Mapping[str, str]) -> str:
    return sources.get(key, DEFAULT)


# ---------------------------------------------------------------------------------------------------- building


def build(cls: type[C], data: Any, source: str, path: str = "") -> C:
    """Build a settings object bottom-up, so that every error can name its full dotted key."""
    if isinstance(data, cls):
        return data
    if not isinstance(data, Mapping):
        raise ConfigError(f"{source}: {path or 'the file'} should be a mapping of settings, found {data!r}")
    fields = cls.model_fields
    for key in data:
        if key not in fields:
            raise ConfigError(f"{source}: {_unknown_key(cls, str(key), path)}")
    built = {k: _build_value(fields[k].annotation, fields[k].metadata, v, source, _join(path, k)) for k, v in data.items()}
    try:
        return cls(**built)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_explain_error(error, path, built)}") from error


def _build_value(annotation: Any, metadata: list[Any], value: Any, source: str, path: str) -> Any:
    registry = next((m.registry for m in metadata if isinstance(m, FromRegistry)), None)
    if get_origin(annotation) is typing.Annotated:
        inner, *more = get_args(annotation)
        return _build_value(inner, [*metadata, *more], value, source, path)
    if value is None:
        return None
    if registry is not None and not _holds(annotation):
        return _build_choice(registry, value, source, path)
    arms = [arm for arm in get_args(annotation) if arm is not type(None)] if _is_union(annotation) else [annotation]
    for arm in arms:
        if isinstance(arm, type) and issubclass(arm, Config):
            return build(arm, value, source, path)
        if get_origin(arm) is typing.Annotated:
            return _build_value(arm, metadata, value, source, path)
        if get_origin(arm) is dict and isinstance(value, Mapping):
            inner = get_args(arm)[1]
            return {k: _build_value(inner, metadata, v, source, _join(path, str(k))) for k, v in value.items()}
        if get_origin(arm) in (list, tuple) and isinstance(value, list):
            inner = get_args(arm)[0]
            return [_build_value(inner, metadata, v, source, f"{path}.{i}") for i, v in enumerate(value)]
    return value


def _build_choice(registry: Registry, value: Any, source: str, path: str) -> Choice:
    data = {"name": value} if isinstance(value, str) else value
    if isinstance(data, Choice):
        return data
    if not isinstance(data, Mapping) or not isinstance(data.get("name"), str):
        raise ConfigError(f"{source}: {path} should name a {registry.kind} ({', '.join(registry)}), found {value!r}")
    try:
        cls = registry.settings(data["name"]) or Choice
    except (UnknownName, CannotLoad) as error:
        raise ConfigError(f"{source}: {path}: {error}") from error
    return build(cls, data, source, path)


def _holds(annotation: Any) -> bool:
    """Whether the marked annotation is a container of choices rather than one choice."""
    arms = get_args(annotation) if _is_union(annotation) else (annotation,)
    return any(get_origin(arm) in (dict, list, tuple) for arm in arms)


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _unknown_key(cls: type[Config], key: str, path: str) -> str:
    known = list(cls.model_fields)
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"; did you mean {_join(path, near[0])!r}?" if near else ""
    return f"unknown key {_join(path, key)!r}{hint} ({path or 'the top level'} has: {', '.join(known)})"


def _explain_error(error: ValidationError, path: str, built: Mapping[str, Any]) -> str:
    first = error.errors()[0]
    location = ".".join(str(part) for part in first["loc"])
    key = _join(path, location) if location else path or "the run file"
    if first["type"] == "missing":
        return f"{key} is required and was not set"
    message = first["msg"].removeprefix("Value error, ")
    shown = first.get("input")
    return f"{key}: {message}" + ("" if shown is None or isinstance(shown, Mapping) else f" (found {shown!r})")


# --------------------------------------------------------------------------------------------- looking at configs


def walk(config: Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key with its value, sections left out, without counting as a read."""
    for name in type(config).model_fields:
        yield from _walk_value(f"{prefix}{name}", config.__dict__[name])


def _walk_value(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Config):
        yield from walk(value, f"{key}.")
    elif isinstance(value, dict) and any(isinstance(inner, Config) for inner in value.values()):
        for name, inner in value.items():
            yield from _walk_value(f"{key}.{name}", inner)
    elif isinstance(value, list | tuple) and any(isinstance(inner, Config) for inner in value):
        for index, inner in enumerate(value):
            yield from _walk_value(f"{key}.{index}", inner)
    else:
        yield key, value


def _sections(config: Config, prefix: str = "") -> Iterator[tuple[str, Config]]:
    yield prefix, config
    for name in type(config).model_fields:
        yield from _sections_in(f"{prefix}{name}.", config.__dict__[name])


def _sections_in(prefix: str, value: Any) -> Iterator[tuple[str, Config]]:
    if isinstance(value, Config):
        yield from _sections(value, prefix)
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _sections_in(f"{prefix}{name}.", inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _sections_in(f"{prefix}{index}.", inner)


def forget_reads(config: Config) -> None:
    """Start counting reads anew: validators read fields too, and that is not using them."""
    for _, section in _sections(config):
        section._reads.clear()


def unread(loaded: Loaded[Any]) -> list[str]:
    """Keys that were set by a file or on the command line and that nothing has read so far."""
    read = {f"{prefix}{name}" for prefix, section in _sections(loaded.config) for name in section._reads}
    return [key for key in loaded.explicit() if key not in read and not key.endswith(".name")]


def require_all_read(loaded: Loaded[Any]) -> None:
    """Raise ConfigError if a setting would be accepted and ignored."""
    ignored = unread(loaded)
    if ignored:
        where = ", ".join(f"{key} (set by {loaded.provenance[key]})" for key in ignored)
        raise ConfigError(f"set, but used by nothing in this run: {where}; remove it, or choose the part that uses it")


def dump(config: Config) -> str:
    """The resolved settings as YAML, in declaration order: what `config.yaml` of a run folder holds."""
    return yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True)


def plain(config: Config) -> dict[str, Any]:
    """The settings as JSON-compatible data; sub-settings keep the fields of their own class."""
    return config.model_dump(mode="json", serialize_as_any=True)


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `hone config --explain KEY` tells about one key."""

    key: str
    meaning: str
    unit: str
    type: str
    default: str
    value: Any
    source: str


def explain(loaded: Loaded[Any], key: str) -> list[Explanation]:
    """The explanations of a key, or of every key of a section. Raises ConfigError with the nearest key."""
    keys = [k for k in loaded.provenance if k == key or k.startswith(f"{key}.")]
    if not keys:
        near = difflib.get_close_matches(key, list(loaded.provenance), n=3, cutoff=0.4)
        raise ConfigError(f"no key {key!r}" + (f"; near: {', '.join(near)}" if near else ""))
    sections = dict(_sections(loaded.config))
    return [_explain_one(sections, loaded, k) for k in keys]


def _explain_one(sections: Mapping[str, Config], loaded: Loaded[Any], key: str) -> Explanation:
    prefix, name = "", key
    while f"{prefix}{name}" == key and name not in type(sections[prefix]).model_fields:
        prefix = max((p for p in sections if key.startswith(p) and p != key), key=len)
        name = key.removeprefix(prefix)
        if name not in type(sections[prefix]).model_fields:
            name = name.split(".")[0]
            break
    section = sections[prefix]
    info: FieldInfo = type(section).model_fields[name]
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    return Explanation(
        key=key,
        meaning=info.description or "",
        unit=str(extra.get("unit", "")),
        type=_type_name(info.annotation),
        default=_default_text(info),
        value=section.__dict__[name],
        source=loaded.provenance[key],
    )


def _type_name(annotation: Any) -> str:
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation.__name__
    return str(annotation).replace("typing.", "").replace("<class '", "").replace("'>", "")


def _default_text(info: FieldInfo) -> str:
    if info.default_factory is not None:
        return repr(info.default_factory())  # type: ignore[call-arg]
    return "required" if info.default is PydanticUndefined else repr(info.default)


__all__ = [
    "COMMAND_LINE",
    "DEFAULT",
    "Choice",
    "Config",
    "ConfigError",
    "Explanation",
    "FromRegistry",
    "Loaded",
    "SerializeAsAny",
    "build",
    "dump",
    "explain",
    "load",
    "plain",
    "require_all_read",
    "setting",
    "unread",
    "walk",
]
