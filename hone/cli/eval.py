"""`hone eval`: evaluate any model on the evaluation sets of a run file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hone.cli.recipe import load_recipe, run_file_of
from hone.config import ConfigError
from hone.models.settings import ModelConfig
from hone.trainers.policy.evaluate_model import evaluate_model
from hone.trainers.policy.settings import PolicyRunConfig


def eval(
    recipe: Annotated[Path, typer.Argument(help="run folder, or run file (YAML) with evaluation.sets")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, such as evaluation.sampling.temperature=0.7")
    ] = None,
    model: Annotated[str, typer.Option(help="model folder or hub name; default: the run's export")] = "",
    adapter: Annotated[
        list[str] | None,
        typer.Option(help="name=folder of a LoRA adapter to evaluate too; may be repeated"),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="also write the results to this file, as JSON")] = None,
) -> None:
    """Evaluate a model on the held-out sets of a run, or of a run file."""
    config = load_recipe(*run_file_of(recipe, overrides or [])).config
    if not isinstance(config, PolicyRunConfig):
        raise ConfigError(
            f"{recipe} has kind: {config.kind}, which has no evaluation sets; give a run file of kind rl or distill"
        )
    if not config.evaluation.sets:
        raise ConfigError(f"{recipe}: evaluation.sets is empty; add at least one set")
    figures = evaluate_model(config, _model(config, model), _adapters(adapter or []))
    table = Table("figure", "value")
    for name, value in figures.items():
        table.add_row(Text(name.removeprefix("eval/")), f"{value:.4f}")
    Console().print(table)
    if output is not None:
        output.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def _adapters(given: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in given:
        name, separator, folder = one.partition("=")
        if not (separator and name and folder) or name in found:
            raise ConfigError(f"--adapter {one!r} should be name=folder, with a different name for each")
        found[name] = folder
    return found


def _model(config: PolicyRunConfig, model: str) -> ModelConfig:
    if model:
        return config.model.at(model)
    export = Path(config.run.dir) / "export"
    if (export / "config.json").is_file():
        return config.model.at(export)
    if config.model.build is not None:
        raise ConfigError(f"run.dir {config.run.dir} has no export yet: train first, or give a model with --model")
    return config.model
