"""Aggregation: the weight of each token's loss in the sum.

A loss returns a value per token. The scalar is sum(values * loss_weights); the weights are computed once per optimizer
step, over all micro-batches and ranks, before its first backward. So the gradient does not depend on how the step is
cut:

    mode                       weight of a loss token in a sequence with l loss tokens   (M tokens, S sequences a step)
    token_mean                 1 / M
    seq_mean_token_mean        1 / (S l)
    seq_mean_token_sum         1 / S
    seq_mean_token_sum_norm    1 / (S norm_tokens)
    token_sum                  1

A sequence without any loss token counts in no numerator and no denominator.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hone.algorithms.segments import loss_token_counts, spread
from hone.algorithms.settings import AggregationSettings


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Denominators of one optimizer step. Ranks with different sequences add up their counts first.

    >>> StepCounts(10, 2) + StepCounts(3, 1)
    StepCounts(tokens=13, sequences=3, rewarded_tokens=0.0)
    """

    tokens: float  # loss tokens
    sequences: float  # sequences with at least one loss token
    rewarded_tokens: float = 0.0  # loss tokens of sequences with a reward above 0; counted for `positive_nll_coef` only

    def __add__(self, other: StepCounts) -> StepCounts:
        return StepCounts(
            self.tokens + other.tokens,
            self.sequences + other.sequences,
            self.rewarded_tokens + other.rewarded_tokens,
        )


def step_counts(loss_mask: Tensor, cu_seqlens: Tensor, repeats: Tensor | None = None) -> StepCounts:
    """Count loss tokens and sequences; sequence i counts `repeats[i]` times (default: once)."""
    counts = loss_token_counts(loss_mask, cu_seqlens)
    times = torch.ones_like(counts) if repeats is None else repeats
    return StepCounts(tokens=(counts * times).sum().item(), sequences=((counts > 0) * times).sum().item())


def loss_weights(
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    settings: AggregationSettings,
    counts: StepCounts | None = None,
    repeats: Tensor | None = None,
) -> Tensor:
    """Weight of each token's loss, [T] float32.

    Pass the whole step's `counts` if this batch is only one rank's part of it. Mode null means token_mean.
    """
    lengths = loss_token_counts(loss_mask, cu_seqlens)
    step = counts or step_counts(loss_mask, cu_seqlens, repeats)
    tokens, sequences = max(step.tokens, 1), max(step.sequences, 1)
    ones = torch.ones_like(lengths, dtype=torch.float64)
    match settings.mode or "token_mean":
        case "token_mean":
            weights = ones / tokens
        case "seq_mean_token_mean":
            weights = ones / (sequences * lengths.clamp(min=1))
        case "seq_mean_token_sum":
            weights = ones / sequences
        case "seq_mean_token_sum_norm":
            weights = ones / (sequences * (settings.norm_tokens or 1))
        case "token_sum":
            weights = ones
    if repeats is not None:
        weights = weights * repeats
    return torch.where(loss_mask, spread(weights, cu_seqlens), 0).float()
