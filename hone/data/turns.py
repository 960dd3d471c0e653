"""The fields of a batch that come from turns: their rewards, and the states in which they began."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hone.types import Trajectory


def turn_fields(chosen: Sequence[tuple[int, Trajectory]]) -> dict[str, torch.Tensor | None]:
    """`token_rewards` and `anchors` of the trajectories, given with the number of their group; None: there are none."""
    return {"token_rewards": _rewards([one for _, one in chosen]), "anchors": _anchors(chosen)}


def _rewards(chosen: Sequence[Trajectory]) -> torch.Tensor | None:
    """Rewards of turns on the last token of each, and the rest of the reward on the last one sampled, [T] float64.

    Their sum over a sequence is its reward. None: no environment gave a reward for a turn.
    """
    if all(span.reward is None for one in chosen for span in one.spans):
        return None
    placed: list[NDArray[np.float64]] = []
    for one in chosen:
        row = np.zeros(len(one.token_ids))
        for span in one.spans:
            row[span.end - 1] += span.reward or 0.0
        sampled = np.flatnonzero(one.loss_mask)
        if len(sampled):
            row[sampled[-1]] += one.reward - one.turn_reward
        placed.append(row)
    return torch.from_numpy(np.concatenate(placed))


def _anchors(chosen: Sequence[tuple[int, Trajectory]]) -> torch.Tensor | None:
    """The number of the state in which the token's turn began, [T] int64; -1: unknown.

    Equal within one role of one group only. None: no environment names its states.
    """
    if not any(span.anchor for _, one in chosen for span in one.spans):
        return None
    numbers: dict[tuple[int, str, str], int] = {}
    placed: list[NDArray[np.int64]] = []
    for index, one in chosen:
        row = np.full(len(one.token_ids), -1)
        for span in one.spans:
            if span.anchor:
                row[span.start : span.end] = numbers.setdefault((index, one.role, span.anchor), len(numbers))
        placed.append(row)
    return torch.from_numpy(np.concatenate(placed))
