"""Where the time of a step goes: phases that do not overlap and that add up to the step.

    with timer.step():                      perf/step_s      the whole step
        with timer.phase("generate"): ...   perf/generate_s  model work (WORK): generate, forward, backward, reward
        with timer.phase("pack"): ...       perf/pack_s      any other name is the driver's own time
                                            perf/driver_s    the step minus its model work: pack, and what nobody timed
    with timer.phase("evaluate"): ...       perf/evaluate_s  outside a step: timed, in no step's total

Inside a phase another may begin: the outer clock stands still meanwhile, so that nothing counts twice. All metrics with
a wall-clock time in them are `perf/` metrics, so everything else of a deterministic run is the same each time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hone.types import Metric, Metrics

WORK = ("generate", "reward", "forward", "backward")
"""The phases that are the point of a step; the rest of it is driver overhead."""


class Timer:
    """Times one step after another on one thread.

    `on_phase` is told the name of the phase that runs (empty: none), for a live display. `clock` is for tests.
    """

    def __init__(
        self, on_phase: Callable[[str], None] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._on_phase = on_phase or (lambda name: None)
        self._clock = clock
        self._running: list[str] = []  # phases that have begun and not ended, outermost first
        self._since = 0.0  # when the innermost of them last got the clock
        self._spent: dict[str, float] = {}  # seconds per phase since the last `take`
        self._outside: dict[str, float] = {}  # the same for phases outside a step
        self._step_started: float | None = None
        self._step_s = 0.0

    def shown_by(self, on_phase: Callable[[str], None]) -> None:
        """Tell the phases from now on to a live display."""
        self._on_phase = on_phase

    @contextmanager
    def step(self) -> Iterator[None]:
        """One training step: phases inside it are part of its time."""
        if self._step_started is not None or self._running:
            raise RuntimeError("a step cannot begin inside a step or a phase")
        self._step_started = self._clock()
        try:
            yield
        finally:
            self._step_s += self._clock() - self._step_started
            self._step_started = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the time of the block to `perf/<name>_s`."""
        self._charge()
        self._running.append(name)
        self._on_phase(name)
        try:
            yield
        finally:
            self._charge()
            self._running.pop()
            self._on_phase(self._running[-1] if self._running else "")

    def move(self, seconds: float, name: str) -> None:
        """Say that `seconds` of the current phase so far belong to `name`.

        For work that happened inside a call which the driver cannot look into: rewards that were computed while the
        last answers were still being generated. No more is moved than the current phase has.
        """
        if not self._running:
            raise RuntimeError(f"move({seconds}, {name!r}) outside of a phase: there is no time to move")
        if self._step_started is None:
            return  # outside a step the outermost phase pays for everything
        self._charge()
        book = self._book()
        current = self._charged()
        seconds = min(max(seconds, 0.0), book.get(current, 0.0))
        book[current] = book.get(current, 0.0) - seconds
        book[name] = book.get(name, 0.0) + seconds

    def take(self, tokens: float | None = None) -> Metrics:
        """The timings since the last call, as `perf/` metrics; then start anew.

        `tokens`: how many the step processed (prompt and response, each once), for `perf/tokens_per_s`.
        Means over ranks or steps are weighted so that fractions and rates stay exact.
        """
        outside = {f"{name}_outside" if name in self._spent else name: s for name, s in self._outside.items()}
        metrics = {f"perf/{name}_s": Metric.mean(seconds) for name, seconds in {**self._spent, **outside}.items()}
        step_s = self._step_s
        if step_s > 0:
            driver_s = max(step_s - sum(self._spent.get(name, 0.0) for name in WORK), 0.0)
            metrics["perf/step_s"] = Metric.mean(step_s)
            metrics["perf/driver_s"] = Metric.mean(driver_s)
            metrics["perf/driver_fraction"] = Metric.mean(driver_s / step_s, count=step_s)
            if tokens is not None:
                metrics["perf/tokens_per_s"] = Metric.mean(tokens / step_s, count=step_s)
        self._spent, self._outside, self._step_s = {}, {}, 0.0
        return metrics

    def _book(self) -> dict[str, float]:
        return self._spent if self._step_started is not None else self._outside

    def _charge(self) -> None:
        now = self._clock()
        if self._running:
            book, name = self._book(), self._charged()
            book[name] = book.get(name, 0.0) + now - self._since
        self._since = now

    def _charged(self) -> str:
        """The phase that pays: in a step the innermost, else the outermost (generating for `evaluate` is that)."""
        return self._running[-1] if self._step_started is not None else self._running[0]
