"""`hone quickstart`: train the packaged recipe, wherever hone is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import hone
from hone.cli.recipe import load_recipe
from hone.cli.training import Restart, start
from hone.composition import ConfigError

TASK = "recipes/quickstart/task.py"  # as the recipe names it: from the root of the repository


def quickstart(
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value settings, such as run.steps=10")] = None,
    restart: Restart = False,
) -> None:
    """Train a model of 0.6 M parameters to spell words backward: two minutes on a CPU, without any download.

    The run is in runs/quickstart of the current folder. The same command continues it.
    """
    folder = recipe_folder()
    own = [f"{key}.source.function={folder / 'task.py'}:rows" for key in ("data.train", "warm_start.data.train")]
    own.append(f"evaluation.sets.held_out.source.function={folder / 'task.py'}:rows")
    loaded = load_recipe(folder / "grpo.yaml", [*([] if Path(TASK).is_file() else own), *(overrides or [])], kind="rl")
    start("rl", loaded, restart)


def recipe_folder() -> Path:
    """The recipe in the wheel, or in the repository that an editable installation runs from."""
    package = Path(hone.__file__).parent
    for folder in (package / "recipes" / "quickstart", package.parent / "recipes" / "quickstart"):
        if (folder / "grpo.yaml").is_file():
            return folder
    raise ConfigError(f"{package} has no recipes/quickstart: install hone from a wheel (make wheel) or a clone")
