"""Steps of which no answer could be used: an outage costs them, and does not end the run before it lasts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hone.algorithms.filtering.group_filter import lost_to_failures
from hone.data.packing import nothing_trainable
from hone.trainers.policy.health import FAILED_STEPS, RewardsFailed
from hone.types import TrajectoryGroup


class LostSteps:
    """Counts the steps in a row that failures have left nothing to train on."""

    def __init__(self, steps: int, say: Callable[[str], None]) -> None:
        """`steps`: of the whole run, which has learnt nothing if all of them were lost; `say` tells the user."""
        self._most = min(FAILED_STEPS, steps)
        self._say = say
        self._in_a_row = 0
        self._last = -1

    def note(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        """Note a step whose groups have nothing to train on, and say so if failures are the reason.

        Raises RewardsFailed, with the first failure's text, after several such steps in a row.
        """
        if not all(lost_to_failures(group) for group in groups):
            return
        self._in_a_row = self._in_a_row + 1 if step == self._last + 1 else 1
        self._last = step
        reason = nothing_trainable(groups)
        if self._in_a_row >= self._most:
            many = f" (as in all of the last {self._most} steps)" if self._most > 1 else ""
            raise RewardsFailed(f"{reason}{many}")
        self._say(f"error: step {step} is skipped: {reason}. The run ends after {self._most} such steps in a row")


__all__ = ["LostSteps"]
