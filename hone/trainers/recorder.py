"""Collects one step's metrics from the parts of a run, and times its phases."""

from __future__ import annotations

from contextlib import AbstractContextManager

from hone.tracking.metrics import Timer
from hone.types import Metrics, merge_metrics


class Recorder:
    """Every part adds its metrics here; the loop drains them once per step."""

    def __init__(self, timer: Timer) -> None:
        self.timer = timer
        self._metrics: Metrics = {}
        self._tokens = 0

    def record(self, metrics: Metrics) -> None:
        """Merge into what the step has so far, each metric by its own reducer."""
        self._metrics = merge_metrics(self._metrics, metrics)

    def tokens(self, count: int) -> None:
        """Count tokens that the step processed, for its throughput."""
        self._tokens += count

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self.timer.phase(name)

    def drain(self) -> dict[str, float]:
        """The step's figures, timings included, in a fixed order; then start anew."""
        timings = self.timer.take(self._tokens or None)
        figures = {name: metric.value for name, metric in {**self._metrics, **timings}.items()}
        self._metrics, self._tokens = {}, 0
        return dict(sorted(figures.items()))
