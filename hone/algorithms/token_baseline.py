"""Optimal token baseline: one baseline per position, weighted by each trajectory's share of the gradient.

Source: arXiv 2602.07078. With s_t = 1 - 2 pi_t + sum pi^2 (the squared norm of the logit gradient of token t) and
W_t = s_1 + ... + s_t, the baseline of position t in a group is B_t = sum G_t W_t / sum W_t over the trajectories that
reach it (masked ones too), and A_t = G_t - B_t. B_t = 0 at positions that only one trajectory reaches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hone.algorithms.advantages import Advantages, token_rewards
from hone.algorithms.correction import IS_WEIGHTS
from hone.algorithms.segments import Grid, compared, reward_to_go, sequence_extreme, sequence_ids
from hone.algorithms.settings import AdvantageSettings
from hone.types import Batch


def optimal_token_baseline(batch: Batch, settings: AdvantageSettings) -> Advantages:
    """Return of a token minus the group's variance-optimal baseline at its position; observations count as positions.

    Each trajectory of an episode weighs 1 / their number.
    Reads `old_logprobs` and `sum_pi_squared`; raises ValueError without them.
    """
    tokens = torch.arange(len(batch.loss_mask), device=batch.loss_mask.device)
    ids = sequence_ids(batch.cu_seqlens)
    first = sequence_extreme(tokens.double(), batch.sampled_mask, batch.cu_seqlens, largest=False)[ids]
    last = sequence_extreme(tokens.double(), batch.sampled_mask, batch.cu_seqlens)[ids]
    return _advantages(batch, (tokens >= first) & (tokens <= last))


def tir_optimal_token_baseline(batch: Batch, settings: AdvantageSettings) -> Advantages:
    """`optimal_token_baseline` for tool-integrated reasoning: only generated tokens count as positions."""
    return _advantages(batch, batch.sampled_mask)


def _advantages(batch: Batch, counted: Tensor) -> Advantages:
    """Compute A_t; `counted` [T] bool marks the tokens that t counts."""
    grid = Grid.of(counted, batch.cu_seqlens)
    mask = grid.gather(batch.sampled_mask)
    returns = grid.gather(reward_to_go(token_rewards(batch).double(), counted, batch.cu_seqlens))
    weights = (grid.gather(_energy(batch)) * mask).cumsum(1) * mask * _episode_share(batch)[:, None]
    group = compared(batch)
    there = grid.gather(torch.ones_like(batch.loss_mask)).double()
    sums = torch.zeros(int(group.max()) + 1, grid.shape[1], dtype=torch.float64, device=mask.device)
    baseline = sums.index_add(0, group, returns * weights) / sums.index_add(0, group, weights).clamp(min=1e-8)
    left = sums.index_add(0, group, there)
    baseline = torch.where(left > 1, baseline, 0)[group]
    dtype = batch.rewards.dtype if batch.rewards is not None else torch.float32
    advantages = grid.scatter(returns - baseline, len(batch.loss_mask))
    return Advantages(torch.where(batch.loss_mask, advantages, 0).to(dtype))


def _energy(batch: Batch) -> Tensor:
    """s_t, times the squared importance weight if the loss uses weights, [T] float64."""
    if batch.old_logprobs is None or batch.sum_pi_squared is None:
        raise ValueError("the optimal token baseline needs Batch.old_logprobs and Batch.sum_pi_squared")
    energy = 1 - 2 * batch.old_logprobs.double().exp() + batch.sum_pi_squared.double()
    weights = IS_WEIGHTS.of(batch)
    return energy if weights is None else energy * weights.double().square()


def _episode_share(batch: Batch) -> Tensor:
    """1 / number of trajectories of the sequence's episode, [N] float64."""
    _, episode, times = torch.unique(batch.episode_index, return_inverse=True, return_counts=True)
    share: Tensor = 1 / times[episode].double()
    return share
