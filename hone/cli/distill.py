"""`hone distill`: on-policy distillation, from a run file or from flags."""

from __future__ import annotations

from hone.cli.flags import Data, Flags, Model, Overrides, Recipe, Teacher, Write, load_command
from hone.cli.starting import Restart, start


def distill(
    recipe: Recipe = None,
    overrides: Overrides = None,
    model: Model = "",
    data: Data = "",
    teacher: Teacher = "",
    write: Write = None,
    restart: Restart = False,
) -> None:
    """Distil one or more teacher models into a policy, on the policy's own samples.

    With the run.dir of an earlier run, continue that run. Give a run file, or --model, --data and --teacher. Every key
    of a run file is a flag too: --run.steps 10.
    """
    loaded = load_command("distill", recipe, overrides, Flags(model, data, teacher=teacher, write=write))
    start("distill", loaded, restart)
