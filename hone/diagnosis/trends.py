"""Statistics of a curve that rules compare: beginning, end, level shifts, spikes."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

LEAST = 6
"""Steps below which no rule speaks of a trend."""
RECENT = 10
"""Steps that speak for the present."""


class Point(NamedTuple):
    """A value of a metric at a step."""

    step: int
    value: float


class Curve(tuple[Point, ...]):
    """Values of one metric at the steps that have it, in order."""

    def beginning(self) -> float:
        """Median of the first fifth, at least three steps."""
        return median(point.value for point in self[: self._part()])

    def end(self) -> float:
        """Median of the last fifth, at least three steps."""
        return median(point.value for point in self[-self._part() :])

    def level(self) -> float:
        """Median of all values."""
        return median(point.value for point in self)

    def _part(self) -> int:
        return max(3, len(self) // 5)

    @property
    def long(self) -> bool:
        """True if there are enough steps for a trend."""
        return len(self) >= LEAST

    def last(self, count: int) -> Curve:
        """Return the last values."""
        return Curve(self[-count:])

    def since(self, holds: Sequence[bool]) -> int | None:
        """Return the step from which a condition, one truth for each point, held to the end; None if it does not."""
        start = None
        for point, true in zip(self, holds, strict=True):
            start = (point.step if start is None else start) if true else None
        return start

    def shifted_below(self, share: float) -> int | None:
        """Return the step from which the median of three values stays below `share` of the level before it.

        None if that is fewer than `LEAST` steps: other work of a machine ends soon.
        """
        if len(self) < 2 * LEAST:
            return None
        level = median(point.value for point in self[: len(self) // 2])
        start = self.since([point.value < share * level for point in self.smooth()])
        return start if start is not None and start <= self[-LEAST].step else None

    def smooth(self) -> Curve:
        """Return the medians of each point and its neighbours, which no single step moves."""
        near = (self[max(0, i - 1) : i + 2] for i in range(len(self)))
        return Curve(Point(one.step, median(p.value for p in part)) for one, part in zip(self, near, strict=True))

    def spikes(self, factor: float) -> Curve:
        """Return the points above `factor` times the median of the ten before them, and high among the last fifty.

        Where most steps are nearly 0, as in a task that is learnt, an ordinary one is far above them.
        """
        found = []
        for index in range(3, len(self)):
            usual = median(point.value for point in self[max(0, index - 10) : index])
            if usual > 0 and self[index].value > factor * usual:
                before = sorted(point.value for point in self[max(0, index - 50) : index])
                if self[index].value > 2 * before[len(before) * 3 // 4]:
                    found.append(self[index])
        return Curve(found)


def correlation(first: Curve, second: Curve) -> float:
    """Pearson's correlation of two curves at the steps that both have; 0 where one does not vary."""
    other = {point.step: point.value for point in second}
    pairs = [(point.value, other[point.step]) for point in first if point.step in other]
    if len(pairs) < LEAST:
        return 0.0
    means = [sum(values) / len(pairs) for values in zip(*pairs, strict=True)]
    deviations = [(a - means[0], b - means[1]) for a, b in pairs]
    product = sum(a * b for a, b in deviations)
    spread = (sum(a * a for a, _ in deviations) * sum(b * b for _, b in deviations)) ** 0.5
    return product / spread if spread > 0 else 0.0
