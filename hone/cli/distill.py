"""`hone distill`: on-policy distillation from a run file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hone.cli.recipe import load_recipe
from hone.cli.running import report_run
from hone.trainers.launch import run_policy


def distill(
    recipe: Annotated[Path, typer.Argument(help="run file (YAML)")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, such as run.steps=10")] = None,
) -> None:
    """Train a policy on its own answers with what teachers think of them. The same run.dir continues the same run."""
    loaded = load_recipe(recipe, overrides or [], kind="distill")
    report_run(Path(loaded.config.run.dir), lambda: run_policy(loaded))
