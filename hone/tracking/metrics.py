"""Measure the time of a step by phases, which do not overlap and add up to the step.

    with timer.step():                      perf/step_s      the whole step
        with timer.phase("generate"): ...   perf/generate_s  model work (WORK): generate, forward, backward, reward
        with timer.phase("pack"): ...       perf/pack_s      any other name: time of the driver
                                            perf/driver_s    the step minus its model work: pack, all that is not timed
    with timer.phase("evaluate"): ...       perf/evaluate_s  outside a step: timed, but not part of a step

A phase may begin inside another one; the outer clock stops meanwhile, so nothing counts twice. All metrics that depend
on wall-clock time are `perf/` metrics, so all others are equal in two runs of a deterministic run file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hone.types import Metric, Metrics

WORK = ("generate", "trainer_wait", "reward", "forward", "backward")
"""Phases of model work, or of waiting for it; the rest of a step is driver overhead."""

FOR_ANSWERS = ("generate", "trainer_wait", "reward")
"""Phases in which answers are made or waited for, so that nothing is trained."""


class Timer:
    """Times one step after another in one thread.

    `on_phase` is called with the name of the running phase (empty: none), for a live display. `clock` is for tests.
    """

    def __init__(
        self, on_phase: Callable[[str], None] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._on_phase = [] if on_phase is None else [on_phase]
        self._clock = clock
        self._running: list[str] = []  # phases that have begun and not ended, outermost first
        self._since = 0.0  # when the clock of the innermost phase last started
        self._spent: dict[str, float] = {}  # seconds per phase since the last `take`
        self._outside: dict[str, float] = {}  # the same for phases outside a step
        self._step_started: float | None = None
        self._step_s = 0.0

    def shown_by(self, *on_phase: Callable[[str], None]) -> None:
        """Call each of `on_phase` for each phase from now on."""
        self._on_phase = list(on_phase)

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
        """Count the time of the block in `perf/<name>_s`. An error of the block gets a note with the phase."""
        self._charge()
        self._running.append(name)
        self._show(name)
        try:
            yield
        except Exception as error:
            error.add_note(f"in phase {name}")  # `hone diagnose` reads it in the traceback
            raise
        finally:
            self._charge()
            self._running.pop()
            self._show(self._running[-1] if self._running else "")

    def _show(self, phase: str) -> None:
        for show in self._on_phase:
            show(phase)

    def move(self, seconds: float, name: str) -> None:
        """Move `seconds` of the current phase's time to the phase `name`, at most as much as the current phase has.

        For work inside a call that the driver cannot time: rewards that were computed while the last answers were
        still being generated.
        """
        if not self._running:
            raise RuntimeError(f"move({seconds}, {name!r}) was called outside a phase; call it inside one")
        if self._step_started is None:
            return  # outside a step all time counts for the outermost phase
        self._charge()
        book = self._book()
        current = self._charged()
        seconds = min(max(seconds, 0.0), book.get(current, 0.0))
        book[current] = book.get(current, 0.0) - seconds
        book[name] = book.get(name, 0.0) + seconds

    def take(self, tokens: float | None = None) -> Metrics:
        """Return the timings since the last call as `perf/` metrics, and reset them.

        `tokens`: prompt and response tokens of the step, each counted once, for `perf/tokens_per_s`. Means over ranks
        or steps are weighted, so that fractions and rates stay exact.
        """
        outside = {f"{name}_outside" if name in self._spent else name: s for name, s in self._outside.items()}
        metrics = {f"perf/{name}_s": Metric.mean(seconds) for name, seconds in {**self._spent, **outside}.items()}
        step_s = self._step_s
        if step_s > 0:
            driver_s = max(step_s - sum(self._spent.get(name, 0.0) for name in WORK), 0.0)
            metrics["perf/step_s"] = Metric.mean(step_s)
            metrics["perf/driver_s"] = Metric.mean(driver_s)
            metrics["perf/driver_fraction"] = Metric.mean(driver_s / step_s, count=step_s)
            if answers := [self._spent[name] for name in FOR_ANSWERS if name in self._spent]:
                trained = max(1.0 - sum(answers) / step_s, 0.0)
                metrics["perf/trainer_utilisation"] = Metric.mean(trained, count=step_s)
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
        """The phase whose time runs: in a step the innermost, else the outermost, such as `evaluate`."""
        return self._running[-1] if self._step_started is not None else self._running[0]
