"""Collects one step's metrics from the parts of a run, times its phases, and fails a run that no longer learns."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import AbstractContextManager

from hone.tracking.metrics import Timer
from hone.types import Metrics, merge_metrics

SKIPPED = "skipped_steps"  # metric of an engine, under the role's name


class NotFinite(RuntimeError):
    """Too many optimizer steps in a row had a gradient that was not finite, so nothing was trained."""


class Recorder:
    """Every part adds its metrics here; the loop takes them once per step."""

    def __init__(self, timer: Timer, max_skipped_steps: int | None = None) -> None:
        """After `max_skipped_steps` skipped optimizer steps in a row, `record` raises NotFinite; None: never."""
        self.timer = timer
        self._max_skipped = max_skipped_steps
        self._skipped: Counter[str] = Counter()  # metric -> skipped optimizer steps in a row
        self._metrics: Metrics = {}
        self._tokens = 0

    def record(self, metrics: Metrics) -> None:
        """Merge into what the step has so far, each metric by its own reducer.

        Raises NotFinite if an engine has skipped too many optimizer steps in a row.
        """
        self._metrics = merge_metrics(self._metrics, metrics)
        for name in metrics:
            if name.endswith(f"/{SKIPPED}"):
                self._count_skipped(name, metrics)

    def _count_skipped(self, name: str, metrics: Metrics) -> None:
        self._skipped[name] = self._skipped[name] + 1 if metrics[name].value > 0 else 0
        if self._max_skipped is not None and self._skipped[name] >= self._max_skipped:
            found = [f"{other} = {one.value}" for other, one in metrics.items() if not math.isfinite(one.value)]
            raise NotFinite(
                f"{self._skipped[name]} optimizer steps in a row were skipped, because the gradient was not finite "
                f"({name}; run.stop_when.skipped_steps = {self._max_skipped}); in the last one, not finite: "
                f"{', '.join(found) or 'the gradient alone'}"
            )

    def tokens(self, count: int) -> None:
        """Count tokens that the step processed, for its throughput."""
        self._tokens += count

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self.timer.phase(name)

    def drain(self) -> dict[str, float]:
        """The step's figures, timings included, in a fixed order; then reset."""
        timings = self.timer.take(self._tokens or None)
        figures = {name: metric.value for name, metric in {**self._metrics, **timings}.items()}
        self._metrics, self._tokens = {}, 0
        return dict(sorted(figures.items()))
