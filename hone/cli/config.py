"""`hone config`: show all settings of a run file and their sources, explain a key, print the JSON schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from hone.cli.recipe import DEFAULT_KIND, KINDS, load_recipe
from hone.config import ConfigError, Loaded
from hone.explain import Explanation, annotated, explain, schema, value_text


def config(
    recipe: Annotated[Path | None, typer.Argument(help="run file (YAML)")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value settings, such as run.steps=10")] = None,
    explain_key: Annotated[str, typer.Option("--explain", metavar="KEY", help="explain a key or a section")] = "",
    as_schema: Annotated[bool, typer.Option("--schema", help="print a JSON schema, for editors")] = False,
) -> None:
    """Show every setting of a run file after overrides; a comment names the source of each that is not a default."""
    if as_schema:
        typer.echo(json.dumps(schema_of(recipe), indent=2))
        return
    if recipe is None:
        raise ConfigError("no run file was given: hone config RECIPE")
    loaded = load_recipe(recipe, overrides or [])
    console = Console(soft_wrap=True, highlight=False)
    if explain_key:
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


def _paragraph(found: Explanation) -> Text:
    text = Text(found.key, style="bold")
    unit = f", in {found.unit}" if found.unit else ""
    rows = {
        "meaning": found.meaning or "(no description)",
        "type": f"{found.type}{unit}",
        "default": found.default,
        "value": value_text(found.value),
        "set by": found.source,
    }
    for label, value in rows.items():
        text.append(f"\n  {label:<8} ", style="dim").append(value, style="")
    return text
