"""The overlong penalty of DAPO (arXiv 2503.14476, section 3.4): long answers lose reward before they are cut off."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hone.algorithms.filtering.settings import OVERLONG, OverlongSettings
from hone.types import Trajectory, TrajectoryGroup


def overlong_penalty(tokens: int, max_response_tokens: int, settings: OverlongSettings) -> float:
    """DAPO's soft punishment: 0 up to the buffer, then falling linearly to -factor at the limit, arXiv 2503.14476."""
    if not settings.punishes:
        return 0.0
    buffer = settings.buffer(max_response_tokens)
    return min(-(tokens - (max_response_tokens - buffer)) / buffer * settings.factor, 0.0)


def check_buffer(max_response_tokens: int, settings: OverlongSettings) -> None:
    """Raise ValueError if the buffer is longer than the response may be."""
    if settings.buffer_tokens is not None and settings.buffer_tokens > max_response_tokens:
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
