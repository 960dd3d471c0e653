"""`hone train`: reinforcement learning, from a run file or from flags."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from hone.cli.flags import Data, Flags, Model, RecipeAndKeys, Reward, Write, load_command
from hone.cli.starting import Restart, start
from hone.config import Loaded
from hone.trainers.policy.settings import PolicyRunConfig


def train(
    given: RecipeAndKeys = None,
    model: Model = "",
    data: Data = "",
    reward: Reward = "",
    write: Write = None,
    restart: Restart = False,
    replay: Annotated[
        Path | None, typer.Option(help="repeat an asynchronous run bit for bit: its schedule.jsonl")
    ] = None,
) -> None:
    """Train a policy with reinforcement learning. With the run.dir of an earlier run, continue that run.

    Give a run file, or --model, --data and --reward. Every key of a run file is a flag too: --run.steps 10.
    """
    recipe, *keys = given or [""]
    loaded = _load(Path(recipe) if recipe else None, keys, replay, Flags(model, data, reward, write=write))
    start("rl", loaded, restart, replay=replay)


def _load(recipe: Path | None, overrides: list[str], replay: Path | None, flags: Flags) -> Loaded[PolicyRunConfig]:
    """The settings of the run. A replay of the run in a folder is written to `<folder>-replay`, next to it."""
    path = recipe / "config.yaml" if replay is not None and recipe is not None and recipe.is_dir() else recipe
    loaded: Loaded[PolicyRunConfig] = load_command("rl", path, overrides, flags)
    if replay is None:
        return loaded
    folder = Path(loaded.config.run.dir)
    if folder.resolve() == replay.parent.resolve():
        other = f"run.dir={folder.with_name(f'{folder.name}-replay')}"
        return load_command("rl", path, [*overrides, other], replace(flags, write=None))
    return loaded
