"""Traces of chosen steps, for Perfetto (https://ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from hone.platforms.base import current_platform
from hone.runtime import ranks
from hone.tracking.hub import Tracking
from hone.trainers.run.settings import ProfileConfig


class Profiler:
    """Writes a trace of each step that `profile.steps` names, of this process with all its threads."""

    def __init__(self, config: ProfileConfig | None, steps: int | None, run_dir: Path, tracking: Tracking) -> None:
        """Raises ValueError for a step that the run does not have."""
        self._steps = frozenset[int]() if config is None else config.of(steps)
        self._folder = run_dir / "profile"
        self._tracking = tracking

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around one step: write its trace, if it is a chosen one and ends without an error."""
        if step not in self._steps or not ranks.is_first():
            yield
            return
        own = current_platform().profiler_activity
        activities = [ProfilerActivity.CPU, *([getattr(ProfilerActivity, own)] if own else [])]
        every_thread = _ExperimentalConfig(profile_all_threads=True)  # rollout and workers may have their own
        # Without `acc_events`, torch 2.11 warns that a second cycle clears the events of the first; there is one cycle.
        with profile(activities=activities, experimental_config=every_thread, acc_events=True) as trace:
            yield
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"step-{step}.json"
        trace.export_chrome_trace(str(path))
        self._tracking.message(f"trace of step {step}: {path}; open it at https://ui.perfetto.dev")
