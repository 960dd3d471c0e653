"""`hone train`: reinforcement learning, from a run file or from flags."""

from __future__ import annotations

from pathlib import Path

from hone.cli.flags import Data, Flags, Model, Overrides, Recipe, Reward, Write, load_command
from hone.cli.running import Restart, report_run
from hone.trainers.run.launch import run_policy


def train(
    recipe: Recipe = None,
    overrides: Overrides = None,
    model: Model = "",
    data: Data = "",
    reward: Reward = "",
    write: Write = None,
    restart: Restart = False,
) -> None:
    """Train a policy with reinforcement learning. With the run.dir of an earlier run, continue that run.

    Give a run file, or --model, --data and --reward. Every key of a run file is a flag too: --run.steps 10.
    """
    loaded = load_command("rl", recipe, overrides, Flags(model, data, reward, write=write))
    report_run(Path(loaded.config.run.dir), lambda: run_policy(loaded), restart)
