"""`hone config`: show all settings of a run file and their sources, explain a key, print the JSON schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from hone.cli.every_key import KnownKey, about, at_path, every_key
from hone.cli.recipe import DEFAULT_KIND, KINDS, load_recipe
from hone.config import ConfigError, Loaded, default_of
from hone.explain import Explanation, annotated, explain, schema, type_text, value_text
from hone.other_frameworks import INSTEAD, keys_meant

MOST_KEYS = 20  # that are shown for words


def config(
    recipe: Annotated[Path | None, typer.Argument(help="run file (YAML)")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value settings, such as run.steps=10")] = None,
    explain_key: Annotated[
        str, typer.Option("--explain", metavar="KEY", help="explain a key or a section, or find keys by words")
    ] = "",
    as_schema: Annotated[bool, typer.Option("--schema", help="print a JSON schema, for editors")] = False,
) -> None:
    """Show every setting of a run file after overrides; a comment names the source of each that is not a default."""
    if as_schema:
        typer.echo(json.dumps(schema_of(recipe), indent=2))
        return
    console = Console(soft_wrap=True, highlight=False)
    if recipe is None:
        if not explain_key:
            raise ConfigError("no run file was given: hone config RECIPE, or hone config --explain KEY-OR-WORDS")
        found = _looked_up(explain_key)
        if found is None:
            raise ConfigError(
                f"no key has {explain_key!r} in its path or its meaning; `hone config --schema` lists all keys"
            )
        console.print(found)
        return
    loaded = load_recipe(recipe, overrides or [])
    if explain_key:
        sections = {key.partition(".")[0] for key in loaded.provenance}
        words = "." not in explain_key and explain_key not in sections  # no key of the file
        if words and (found := _looked_up(explain_key, loaded.config.kind)):
            console.print(found)
            return
        console.print(Text("\n\n").join(_paragraph(found) for found in explain(loaded, explain_key)))
    else:
        _print_settings(console, loaded)


def schema_of(recipe: Path | None) -> dict[str, Any]:
    """The schema of the recipe's kind; without a recipe, a schema of all kinds, chosen by the key `kind`."""
    if recipe is not None:
        return schema(type(load_recipe(recipe).config))
    branches = {name: schema(kind.load()) for name, kind in KINDS.items()}
    definitions: dict[str, Any] = {}
    for branch in branches.values():
        definitions |= branch.pop("$defs")
    dialect = {branch.pop("$schema") for branch in branches.values()}
    combined: dict[str, Any] = branches.pop(DEFAULT_KIND)
    for name, branch in branches.items():
        says = {"properties": {"kind": {"const": name}}, "required": ["kind"]}
        combined = {"if": says, "then": branch, "else": combined}
    return {"$schema": dialect.pop(), **combined, "$defs": definitions}


def _print_settings(console: Console, loaded: Loaded[Any]) -> None:
    for line, source in annotated(loaded):
        shown = Text(line, style="bold" if source else "")
        console.print(shown.append(f"  # {source}", style="green") if source else shown)


def _looked_up(asked: str, only: str = "") -> Text | None:
    """The keys of every kind of run (or of `only` one) at a path, or else those whose path or meaning has all words."""
    kinds = {name: kind.load() for name, kind in KINDS.items() if name == (only or name)}
    for find in (at_path, lambda kind, settings, words: about(every_key(kind, settings), words)):
        found: dict[tuple[str, str], tuple[KnownKey, list[str]]] = {}
        for kind, settings in kinds.items():
            for key in find(kind, settings, asked):
                found.setdefault((key.path, key.chosen), (key, []))[1].append(kind)
        if found:
            shown = [_fact(key, among) for key, among in list(found.values())[:MOST_KEYS]]
            if len(found) > MOST_KEYS:
                shown.append(Text(f"and {len(found) - MOST_KEYS} more: add a word, or name a section", style="dim"))
            return Text("\n\n").join(shown)
    if instead := INSTEAD.get(asked.replace(" ", "_")):
        return Text(instead)
    there = [path for path in keys_meant(asked) if any(at_path(kind, cls, path) for kind, cls in kinds.items())]
    paragraphs = [one for path in there if (one := _looked_up(path, only)) is not None]
    return Text("\n\n").join(paragraphs) if paragraphs else None


def keys_like(option: str) -> list[str]:
    """The keys that may be meant by an option that no command has: `lr` or `run-steps`; at most three."""
    words = option.replace("-", "_")
    every = {one.path: one for name, kind in KINDS.items() for one in every_key(name, kind.load())}
    same = [path for path in keys_meant(option) if path in every] or [
        path for path in every if path.replace(".", "_") == words or path.rpartition(".")[2] == words
    ]
    return (same or [one.path for one in about(list(every.values()), words)])[:3]


def _fact(key: KnownKey, kinds: list[str]) -> Text:
    extra = key.info.json_schema_extra if isinstance(key.info.json_schema_extra, dict) else {}
    rows = {
        "meaning": key.info.description or "(no description)",
        "type": type_text(key.info) + (f", in {extra['unit']}" if extra.get("unit") else ""),
        "default": value_text(default_of(key.info)),
        "with": key.chosen,
        "kinds": "" if len(kinds) == len(KINDS) else ", ".join(kinds),
    }
    return _rows(key.path, {label: value for label, value in rows.items() if value})


def _paragraph(found: Explanation) -> Text:
    unit = f", in {found.unit}" if found.unit else ""
    rows = {
        "meaning": found.meaning or "(no description)",
        "type": f"{found.type}{unit}",
        "default": found.default,
        "value": value_text(found.value),
        "set by": found.source,
    }
    return _rows(found.key, rows)


def _rows(key: str, rows: Mapping[str, str]) -> Text:
    text = Text(key, style="bold")
    for label, value in rows.items():
        text.append(f"\n  {label:<8} ", style="dim").append(value, style="")
    return text
