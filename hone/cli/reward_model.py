"""`hone reward-model`: training a reward model, from a run file or from flags."""

from __future__ import annotations

from hone.cli.flags import Data, Flags, Model, Overrides, Recipe, Write, load_command
from hone.cli.starting import Restart, start


def reward_model(
    recipe: Recipe = None,
    overrides: Overrides = None,
    model: Model = "",
    data: Data = "",
    write: Write = None,
    restart: Restart = False,
) -> None:
    """Train a model that scores answers or their steps. With the run.dir of an earlier run, continue that run.

    Give a run file, or --model and --data. Every key of a run file is a flag too: --run.steps 10.
    """
    loaded = load_command("reward_model", recipe, overrides, Flags(model, data, write=write))
    start("reward_model", loaded, restart)
