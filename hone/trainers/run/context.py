"""Context that every part of a run gets: its folder, its trackers, its metrics."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hone.data.rendering import Renderer
from hone.runtime.settings import RuntimeConfig
from hone.tracking.base import RunInfo
from hone.tracking.hub import Tracking
from hone.tracking.metrics import Timer
from hone.tracking.settings import TrackingConfig
from hone.trainers.run.profiler import Profiler
from hone.trainers.run.recorder import Recorder
from hone.trainers.run.settings import StopWhenConfig


@dataclass(frozen=True, slots=True)
class RunControl:
    """Means by which the caller of a run follows it, ends it early, or has it repeat another."""

    on_step: Callable[[int, Mapping[str, float]], None] | None = None  # gets each step's metrics, on the run's thread
    stop: threading.Event = field(default_factory=threading.Event)  # set: end after this step, as the first Ctrl-C does
    replay: Path | None = None  # the `schedule.jsonl` of an asynchronous run that this run repeats


@dataclass(slots=True)
class Stopping:
    """The rule that ends a run by its score, and what it has seen; a checkpoint holds that as `state`."""

    reaches: float | None = None
    patience: int | None = None
    best: float | None = None
    without: int = 0  # evaluations since the best one
    reason: str = ""  # why the run ends; empty: it goes on

    @classmethod
    def of(cls, config: StopWhenConfig) -> Stopping:
        """The rule of a run file."""
        return cls(config.score_reaches, config.no_better_for)

    def see(self, score: float) -> None:
        """Look at the score of one evaluation."""
        better = self.best is None or score > self.best
        self.without = 0 if better else self.without + 1
        self.best = score if better else self.best
        if self.reaches is not None and score >= self.reaches:
            self.reason = f"the score {score:.4g} has reached run.stop_when.score_reaches = {self.reaches:g}"
        elif self.patience is not None and self.without >= self.patience:
            self.reason = f"{self.without} evaluations brought no better score than {self.best:.4g} (run.stop_when)"

    @property
    def state(self) -> dict[str, Any]:
        return {"rule": self._rule, "best": self.best, "without": self.without, "reason": self.reason}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; with another rule than then, the next evaluation is judged anew."""
        self.best = state["best"]
        if state["rule"] == self._rule:
            self.without, self.reason = state["without"], state["reason"]

    @property
    def _rule(self) -> list[float | None]:
        return [self.reaches, self.patience]


@dataclass(frozen=True, slots=True)
class RunContext:
    """Places to which a run writes its files, figures and timings."""

    folder: Path
    tracking: Tracking
    recorder: Recorder
    profiler: Profiler
    control: RunControl = field(default_factory=RunControl)
    stopping: Stopping = field(default_factory=Stopping)


def untracked_context(folder: Path, renderer: Renderer) -> RunContext:
    """A context without trackers: nothing is written, messages go to standard error."""
    decode = renderer.decode
    hub = Tracking(TrackingConfig(trackers=()), RunInfo(run_dir=folder), lambda ids: decode(ids, keep_special=True))
    return RunContext(folder, hub, Recorder(Timer()), Profiler(None, None, RuntimeConfig(), folder, hub))
