"""`hone prefer`: learning from preferences, from a run file or from flags."""

from __future__ import annotations

from hone.cli.flags import Data, Flags, Model, Overrides, Recipe, Write, load_command
from hone.cli.starting import Restart, start


def prefer(
    recipe: Recipe = None,
    overrides: Overrides = None,
    model: Model = "",
    data: Data = "",
    write: Write = None,
    restart: Restart = False,
) -> None:
    """Train a model on answers that were preferred or rejected. With an earlier run.dir, continue that run.

    Give a run file, or --model and --data. Every key of a run file is a flag too: --loss.name simpo.
    """
    loaded = load_command("prefer", recipe, overrides, Flags(model, data, write=write))
    start("prefer", loaded, restart)
