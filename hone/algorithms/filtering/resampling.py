"""PF-PPO: resample trajectories by their reward, arXiv 2409.06957.

The result is how often each trajectory counts, so nothing is copied and each advantage stays with its trajectory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hone.algorithms.filtering.settings import ResampleSettings


def resampling_weights(rewards: Tensor, settings: ResampleSettings) -> Tensor:
    """Unnormalised probability of each of N trajectories to be drawn, [N] float64.

    Where all weights are 0 (every reward 0 under `power`), all trajectories are equally likely.
    """
    scores = rewards.double()
    match settings.scheme:
        case "power":
            weights = scores.abs() ** (1.0 if settings.power is None else settings.power)
        case "best_and_worst":
            weights = ((scores == scores.max()) | (scores == scores.min())).double()
        case "mostly_best":
            weights = torch.where(scores == scores.max(), 0.4, 0.1).double()
    return weights if bool((weights > 0).any()) else torch.ones_like(weights)


def resample(rewards: Tensor, settings: ResampleSettings, seed: int) -> Tensor:
    """Draw N trajectories from N with replacement: the count of each, [N] int64 (sum N)."""
    generator = torch.Generator().manual_seed(seed)
    weights = resampling_weights(rewards.cpu(), settings)
    drawn = torch.multinomial(weights, len(weights), replacement=True, generator=generator)
    return torch.bincount(drawn, minlength=len(weights)).to(rewards.device)
