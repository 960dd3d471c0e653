"""`hone train`: reinforcement learning from a run file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hone.cli.recipe import load_recipe
from hone.cli.running import Restart, report_run
from hone.trainers.run.launch import run_policy


def train(
    recipe: Annotated[Path, typer.Argument(help="run file (YAML)")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value settings, such as run.steps=10")] = None,
    restart: Restart = False,
) -> None:
    """Train a policy with reinforcement learning. With the run.dir of an earlier run, continue that run."""
    loaded = load_recipe(recipe, overrides or [], kind="rl")
    report_run(Path(loaded.config.run.dir), lambda: run_policy(loaded), restart)
