"""Write the reference pages: every key, metric, command, registered name and public function, from the code.

`make docs` runs `python -m docs.write_reference` before Sphinx. The pages are in docs/reference/, which git ignores.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

import typer
from pydantic.fields import FieldInfo

import hone
from hone.cli.every_key import KeySection, entries, label, sections
from hone.cli.listing import REGISTRIES, registered
from hone.cli.main import COMMANDS
from hone.cli.recipe import KINDS
from hone.config import Choice, Config, default_of
from hone.explain import registry_of, type_text
from hone.registry import Registry, resolve
from hone.tracking.catalogue import METRICS

FOLDER = Path(__file__).with_name("reference")


def pages() -> dict[str, str]:
    """File name -> Markdown."""
    seen: dict[type[Config], str] = {}
    keys = {
        page: text
        for name, kind in KINDS.items()
        for page, text in keys_pages(name, sections(name, kind.load(), seen)).items()
    }
    others = {
        "metrics.md": metrics_page(),
        "commands.md": commands_page(),
        "registries.md": registries_page(),
        "api.md": api_page(),
    }
    return keys | others


def write() -> None:
    """Replace the pages in docs/reference/."""
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.md"):
        old.unlink()
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines) + "\n"


def plain(text: str) -> str:
    """Text for a cell, in which Markdown and HTML mean nothing. Parts in backticks stay code."""
    parts = " ".join(text.split()).split("`")
    words = [part if number % 2 else part.replace("<", "\\<").replace("*", "\\*") for number, part in enumerate(parts)]
    return "`".join(words).replace("|", "\\|")


def code(text: str) -> str:
    """Text as code in a cell: on one line, between longer marks if it has backticks itself."""
    mark = "``" if "`" in text else "`"
    return f"{mark}{text}{mark}".replace("\n", "\\n").replace("|", "\\|") if text else ""


# ------------------------------------------------------------------------------------------------------------- keys


def keys_pages(kind: str, found: Sequence[KeySection]) -> dict[str, str]:
    """File name -> page: one for the top level of a run file, with links to one for each section in it."""
    name = f"keys-{kind.replace('_', '-')}"
    by_top: dict[str, list[KeySection]] = {}
    for section in found:
        by_top.setdefault(section.path.partition(".")[0], []).append(section)
    (top,) = by_top.pop("")
    rows = [[f"[`{part}`]({name}-{part}.md)", _meaning(inside[0])] for part, inside in by_top.items()]
    parts = [
        f"# Keys of `kind: {kind}`\n",
        f"`{KINDS[kind].command}` reads such a run file. [Run files](../configuration.md) describes the syntax.\n",
        f"({label(kind, top)})=\n## The top level\n",
        f"{_meaning(top)}\n",
        _key_table(top),
        "## Sections\n",
        table(["section", "content"], rows),
    ]
    return {f"{name}.md": "\n".join(parts)} | {
        f"{name}-{part}.md": _section_page(kind, part, inside) for part, inside in by_top.items()
    }


def _section_page(kind: str, top: str, found: Sequence[KeySection]) -> str:
    parts = [f"---\norphan: true\n---\n\n# `{top}` of `kind: {kind}`\n"]
    parts.append(f"[All sections](keys-{kind.replace('_', '-')}.md) of such a run file.\n")
    for section in found:
        entry = section.chosen or section.within
        heading = f"`{section.path}` with `{entry}`" if entry else f"`{section.path}`"
        target = "" if section.same_as else f"({label(kind, section)})=\n"
        parts += [f"{target}## {heading}\n", f"{_meaning(section)}\n"]
        parts.append(_same(section) if section.same_as else _key_table(section))
    return "\n".join(parts)


def _meaning(section: KeySection) -> str:
    return plain((section.cls.__doc__ or "").partition("\n")[0])


def _key_table(section: KeySection) -> str:
    rows = []
    for name, info in section.cls.model_fields.items():
        if name == "name" and section.chosen:
            continue
        unit = (info.json_schema_extra or {}).get("unit", "") if isinstance(info.json_schema_extra, dict) else ""
        kind = plain(key_type(info) + (f", in {unit}" if unit else ""))
        rows.append([code(section.key(name)), kind, _default_cell(section, name), plain(info.description or "")])
    return table(["key", "type", "default", "meaning"], rows)


def key_type(info: FieldInfo) -> str:
    mark = registry_of(info)
    if mark is None:
        return type_text(info)
    listed = get_origin(info.annotation) in (list, tuple, dict)
    return ("entries: " if listed else "") + f"one of {', '.join(mark.registry)}"


def _default_cell(section: KeySection, name: str) -> str:
    owned = section.default.__dict__[name] if isinstance(section.default, section.cls) else None
    value = owned if owned is not None else default_of(section.cls.model_fields[name])
    if isinstance(value, Choice):
        return code(value.__dict__["name"])
    if isinstance(value, Config):
        return "see its section"
    text = section.default_text(name)
    return text if text == "required" else code(text)


def _same(section: KeySection) -> str:
    """A link to the section with the same class, and the defaults that differ here."""
    text = f"The keys of [this section](#{section.same_as})."
    own = section.default
    if own is None:
        return text + "\n"
    differing = [
        f"`{section.key(name)}`: {_default_cell(section, name)}"
        for name, info in section.cls.model_fields.items()
        if not isinstance(own.__dict__[name], Config) and own.__dict__[name] != default_of(info)
    ]
    return text + (f" Other defaults: {', '.join(differing)}." if differing else "") + "\n"


# --------------------------------------------------------------------------------------- metrics, commands, registries


def metrics_page() -> str:
    parts = [
        "# Metrics\n",
        "`metrics.jsonl` has these metrics, each in the steps that measured it. The reducer says how the values of "
        "micro-batches, ranks and replicas are merged. In a terminal: `hone list metrics`.\n",
    ]
    for namespace in dict.fromkeys(one.name.partition("/")[0] for one in METRICS):
        rows = [
            [code(one.name), one.unit, str(one.reducer), plain(one.meaning)]
            for one in METRICS
            if one.name.partition("/")[0] == namespace
        ]
        parts += [f"## `{namespace}/`\n", table(["metric", "unit", "reducer", "meaning"], rows)]
    return "\n".join(parts)


def commands_page() -> str:
    parts = ["# Commands\n", "[The command line](../cli.md) shows them in use.\n"]
    for name, command in COMMANDS.items():
        app = typer.Typer(add_completion=False)
        function = resolve(command.target)
        app.command(name)(function)
        click = typer.main.get_command(app)
        usage = " ".join(["hone", name, *(f"[{one}]" if not required else one for one, required in _arguments(click))])
        parts += [f"## `hone {name}`\n", f"{inspect.getdoc(function)}\n", f"```\n{usage}\n```\n"]
        rows = [[code(", ".join(one.opts) if one.opts[0][0] == "-" else _metavar(one)), plain(_help(one)), _given(one)]
                for one in click.params if not getattr(one, "hidden", False)]  # fmt: skip
        parts.append(table(["argument or option", "meaning", "default"], rows))
    return "\n".join(parts)


def _arguments(click: Any) -> list[tuple[str, bool]]:
    return [(_metavar(one), one.required) for one in click.params if one.param_type_name == "argument"]


def _metavar(one: Any) -> str:
    return (one.metavar or str(one.name).upper()) + (" ..." if one.nargs == -1 else "")


def _help(one: Any) -> str:
    return getattr(one, "help", "") or ""


def _given(one: Any) -> str:
    if one.required:
        return "required"
    value = one.default
    return "" if value in (None, "", False, [], ()) or callable(value) else code(str(value))


def registries_page() -> str:
    parts = [
        "# Registered names\n",
        "The names that a run file may use. A plug-in adds its own. In a terminal: `hone list`.\n",
    ]
    for kind, place in REGISTRIES.items():
        registry = resolve(place)
        parts.append(f"## {kind.replace('_', ' ')}\n")
        if isinstance(registry, Mapping):
            rows = [[code(name), code(json.dumps(registry[name]))] for name in sorted(registry)]
            parts.append(table(["name", "sets"], rows))
            continue
        rows = []
        for entry in registered(kind):
            settings = _settings_text(registry, entry.name) if isinstance(registry, Registry) else ""
            rows.append([code(entry.name), plain(first_line(entry.where)), settings, code(entry.where)])
        parts.append(table(["name", "what it is", "settings and defaults", "where"], rows))
    return "\n".join(parts)


def _settings_text(registry: Registry, name: str) -> str:
    found = dict(entries(registry)).get(name)
    if found is None:
        return ""
    section = KeySection("", found, None)
    return ", ".join(code(f"{key}: {section.default_text(key)}") for key in found.model_fields if key != "name")


def first_line(where: str) -> str:
    """The first line of the docstring of "module:attribute", read from its file, so that nothing is imported."""
    module, _, attribute = where.partition(":")
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return ""
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == attribute:
            return (ast.get_docstring(node) or "").partition("\n")[0]
    return ""


def api_page() -> str:
    parts = ["# Python functions\n", "Everything that `import hone` offers. [Python API](../api.md) shows it in use.\n"]
    for name in hone.__all__:
        found = getattr(hone, name)
        parts.append(f"## `hone.{name}`\n")
        if inspect.isfunction(found):
            parts.append(f"```python\nhone.{name}{signature(found)}\n```\n")
        parts.append(f"{inspect.getdoc(found)}\n")
        for member, value in vars(found).items() if inspect.isclass(found) else ():
            if isinstance(value, property):
                parts.append(f"- `.{member}`: {inspect.getdoc(value)}\n")
    return "\n".join(parts)


def signature(function: Callable[..., Any]) -> str:
    """The signature without the quotes that postponed annotations have."""
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(function)))


if __name__ == "__main__":
    write()
