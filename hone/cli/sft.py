"""`hone sft`: supervised fine-tuning, from a run file or from flags."""

from __future__ import annotations

from hone.cli.flags import Data, Flags, Model, Overrides, Recipe, Write, load_command
from hone.cli.starting import Restart, start


def sft(
    recipe: Recipe = None,
    overrides: Overrides = None,
    model: Model = "",
    data: Data = "",
    write: Write = None,
    restart: Restart = False,
) -> None:
    """Fine-tune a model on examples. With the run.dir of an earlier run, continue that run.

    Give a run file, or --model and --data. Every key of a run file is a flag too: --run.steps 10.
    """
    loaded = load_command("sft", recipe, overrides, Flags(model, data, write=write))
    start("sft", loaded, restart)
