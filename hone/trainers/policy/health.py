"""Rewards that fail: above `reward.max_failed_fraction` in 3 steps in a row they end the run, with the first cause.

`hone.diagnosis` tells the user about other faults, which end no run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from hone.types import Status, TrajectoryGroup

FAILED_STEPS = 3  # in a row, that end a run: an outage of one step does not


class RewardsFailed(RuntimeError):
    """Too many answers could not be scored, so what is trained on is not what was asked for."""


class RunHealth:
    """Looks at each step's metrics."""

    def __init__(self, max_failed_fraction: float) -> None:
        self._most = max_failed_fraction
        self._answers: deque[tuple[float, float]] = deque(maxlen=FAILED_STEPS)  # answers, and how many failed
        self._cause = ""

    def note(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Remember why the first of these answers could not be scored."""
        failed = (one for group in groups for one in group.trajectories if one.status is Status.REWARD_FAILED)
        if (first := next(failed, None)) is not None:
            reason = " ".join(first.error.split()) or "no reason given"
            self._cause = f"{first.prompt_id} sample {first.sample}: {reason}"

    def look(self, values: Mapping[str, float]) -> None:
        """Look at one step's metrics. Raises RewardsFailed."""
        if "rollout/trajectories" not in values:
            return
        bad = values.get(f"rollout/status/{Status.REWARD_FAILED}", 0.0)
        self._answers.append((values["rollout/trajectories"], bad))
        answers, failed = (sum(counts) for counts in zip(*self._answers, strict=True))
        if len(self._answers) == FAILED_STEPS and all(one > self._most * many for many, one in self._answers):
            raise RewardsFailed(
                f"{failed:.0f} of {answers:.0f} answers of the last {FAILED_STEPS} steps could not be scored, which is "
                f"more than reward.max_failed_fraction = {self._most} in each; {self._cause}"
            )
