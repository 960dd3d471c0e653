"""Which groups are trained on, and what is added to their rewards: plain functions of trajectories, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from hone.algorithms.settings import DynamicSamplingSettings, OverlongSettings
from hone.registry import unknown
from hone.types import Status, Trajectory, TrajectoryGroup

OVERLONG = "overlong_penalty"
GREEDY_REWARD = "greedy_reward"  # of Trajectory.components: the reward of the greedy answer to the same prompt


class Dropped(NamedTuple):
    """A group that is not trained on, and why; none of its trajectories is trainable any more.

    Their status is now `filtered`, or that of the greedy answer that failed.
    """

    group: TrajectoryGroup
    reason: str


def overlong_penalty(tokens: int, max_response_tokens: int, settings: OverlongSettings) -> float:
    """DAPO's soft punishment: 0 up to the buffer, then falling linearly to -factor at the limit, arXiv 2503.14476."""
    expected = max_response_tokens - settings.buffer_tokens
    return min(-(tokens - expected) / settings.buffer_tokens * settings.factor, 0.0)


def check_buffer(max_response_tokens: int, settings: OverlongSettings) -> None:
    """Raise ValueError if the buffer is longer than the response may be."""
    if settings.buffer_tokens > max_response_tokens:
        raise ValueError(
            f"overlong.buffer_tokens ({settings.buffer_tokens}) is more than the longest response "
            f"({max_response_tokens} tokens)"
        )


def punish_overlong(
    groups: Iterable[TrajectoryGroup], max_response_tokens: int, settings: OverlongSettings
) -> list[TrajectoryGroup]:
    """Add the overlong penalty to every trainable trajectory's reward and note it among its components.

    The greedy answer is punished like the others: it is what they are compared with.

    Raises ValueError if the buffer is longer than the response may be.
    """
    check_buffer(max_response_tokens, settings)

    def shaped(one: Trajectory) -> Trajectory:
        if not one.status.trainable:
            return one
        penalty = overlong_penalty(one.response_length, max_response_tokens, settings)
        return one.with_(reward=one.reward + penalty, components={**one.components, OVERLONG: penalty})

    return [
        replace(
            group, trajectories=tuple(map(shaped, group.trajectories)), greedy=group.greedy and shaped(group.greedy)
        )
        for group in groups
    ]


def with_greedy_reward(group: TrajectoryGroup) -> TrajectoryGroup:
    """The group with the reward of its greedy answer among the components of its trainable trajectories."""
    if group.greedy is None:
        return group
    reward = group.greedy.reward
    noted = (
        one.with_(components={**one.components, GREEDY_REWARD: reward}) if one.status.trainable else one
        for one in group.trajectories
    )
    return replace(group, trajectories=tuple(noted))


def split_trainable(
    groups: Iterable[TrajectoryGroup], settings: DynamicSamplingSettings | None
) -> tuple[list[TrajectoryGroup], list[Dropped]]:
    """Sort groups into those to train on and those dropped, each of the latter with its reason.

    A group without a single trainable token is always dropped, and one whose greedy answer failed: it has no baseline.
    With dynamic sampling also one whose metric is the same for all of its trainable trajectories (arXiv 2503.14476,
    section 3.2). Order is kept.
    Raises ValueError if a trajectory lacks the metric.
    """
    kept: list[TrajectoryGroup] = []
    dropped: list[Dropped] = []
    for group in groups:
        reason = _reason(group, settings)
        if reason:
            dropped.append(Dropped(_marked(group, reason), reason))
        else:
            kept.append(group)
    return kept, dropped


def _reason(group: TrajectoryGroup, settings: DynamicSamplingSettings | None) -> str:
    if not group.trainable:
        return "no trainable trajectory: " + _statuses(group.trajectories)
    if not any(one.response_length for one in group.trainable):
        return "no trainable trajectory has a generated token"
    if group.greedy is not None and not group.greedy.status.trainable:
        return f"the greedy answer failed: {group.greedy.status}"
    if settings is None:
        return ""
    values = [metric_of(one, settings.metric) for one in group.trainable]
    if not without_variance(values):
        return ""
    return f"{settings.metric} is {values[0]:g} for all {len(values)} trajectories"


def without_variance(values: Sequence[float]) -> bool:
    """Whether the values are all the same, up to rounding."""
    return max(values) - min(values) <= 1e-9 * max(1.0, abs(values[0]))


def metric_of(trajectory: Trajectory, metric: str) -> float:
    """The reward before any overlong penalty, or the named component. Raises ValueError with the nearest name.

    Without the penalty, because answers that are all wrong teach nothing else than to be wrong in fewer tokens.
    """
    if metric == "reward":
        return trajectory.reward - trajectory.components.get(OVERLONG, 0.0)
    if metric not in trajectory.components:
        known = ["reward", *trajectory.components]
        raise ValueError(f"prompt {trajectory.prompt_id}: {unknown('dynamic_sampling.metric', metric, known)}")
    return trajectory.components[metric]


def _statuses(trajectories: Sequence[Trajectory]) -> str:
    seen = sorted({str(one.status) for one in trajectories})
    return ", ".join(f"{sum(one.status == s for one in trajectories)} {s}" for s in seen) or "the group is empty"


def _marked(group: TrajectoryGroup, reason: str) -> TrajectoryGroup:
    """Failures keep their own status: filtering must not hide them. A failed greedy answer is its group's failure."""
    status, error = Status.FILTERED, reason
    if group.greedy is not None and not group.greedy.status.trainable:
        status, error = group.greedy.status, f"{reason}: {group.greedy.error}"
    marked = (one.with_(status=status, error=error) if one.status.trainable else one for one in group.trajectories)
    return replace(group, trajectories=tuple(marked))
