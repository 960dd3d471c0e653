"""Traces of chosen steps, for Perfetto (https://ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hone.config import ConfigError
from hone.runtime import RUNTIMES, ranks
from hone.runtime.settings import RuntimeConfig
from hone.tracking.hub import Tracking
from hone.trainers.run.settings import ProfileConfig


class Profiler:
    """Writes traces of each step that `profile.steps` names: of this process, and of the run's ranks."""

    def __init__(
        self, config: ProfileConfig | None, steps: int | None, runtime: RuntimeConfig, run_dir: Path, tracking: Tracking
    ) -> None:
        """Raises ConfigError for a step or a rank that the run does not have."""
        self._steps = self._ranks = frozenset[int]()
        if config is not None:
            try:
                self._steps, self._ranks = config.of(steps), config.ranks_of(runtime.most_ranks())
            except ValueError as error:
                raise ConfigError(str(error)) from error
        self._runtime = runtime
        self._folder = run_dir / "profile"
        self._tracking = tracking

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around one step: write its traces, if it is a chosen one and ends without an error."""
        if step not in self._steps:
            yield
            return
        group_class = RUNTIMES.get(self._runtime.backend.name)
        with group_class.traced(self._runtime, self._ranks, self._folder / f"step-{step}") as found:
            yield
        for problem in found.problems:
            self._warn(problem)
        if found.files:
            first, *others = found.files
            more = f", and {len(others)} of ranks next to it" if others else ""
            self._tracking.message(f"trace of step {step}: {first}{more}; open it at https://ui.perfetto.dev")

    def _warn(self, problem: str) -> None:
        """Show a line on every rank: under torchrun, `message` shows only the first rank's lines."""
        if ranks.is_first():
            self._tracking.message(problem)
        else:
            sys.stderr.write(f"{problem}\n")
