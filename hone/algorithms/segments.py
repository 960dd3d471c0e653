"""Reductions over the sequences of a packed batch. Shapes: T tokens, N sequences, `cu_seqlens` [N+1].

Everything here works in the dtype of its input and has a gradient where its input has one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def sequence_ids(cu_seqlens: Tensor) -> Tensor:
    """Which sequence each token belongs to, [T]."""
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    return torch.repeat_interleave(torch.arange(len(lengths), device=cu_seqlens.device), lengths)


def spread(per_sequence: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Each sequence's value on all of its tokens, [N] -> [T]."""
    return torch.repeat_interleave(per_sequence, cu_seqlens[1:] - cu_seqlens[:-1])


def sequence_sum(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum over each sequence, [T] -> [N]."""
    return values.new_zeros(len(cu_seqlens) - 1).index_add(0, sequence_ids(cu_seqlens), values)


def sequence_mean(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Mean over each sequence's masked tokens, [T] -> [N]; 0 for a sequence that has none."""
    total = sequence_sum(torch.where(mask, values, 0), cu_seqlens)
    return total / sequence_sum(mask.to(values.dtype), cu_seqlens).clamp(min=1)


def sequence_extreme(values: Tensor, mask: Tensor, cu_seqlens: Tensor, largest: bool = True) -> Tensor:
    """Largest (or smallest) masked value of each sequence, [T] -> [N]; -inf (inf) for a sequence that has none."""
    start = values.new_full((len(cu_seqlens) - 1,), -torch.inf if largest else torch.inf)
    ids = sequence_ids(cu_seqlens)[mask]
    return start.scatter_reduce(0, ids, values[mask], "amax" if largest else "amin")


def loss_token_counts(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Number of loss tokens of each sequence, [N] int64."""
    return sequence_sum(mask.long(), cu_seqlens)


def on_last_loss_token(per_sequence: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Each sequence's value on its last loss token and 0 elsewhere, [N] -> [T]; nowhere if it has no loss token."""
    tokens = mask.nonzero().squeeze(1)
    last = tokens.new_full((len(per_sequence),), -1)
    last = last.scatter_reduce(0, sequence_ids(cu_seqlens)[tokens], tokens, "amax")
    placed = per_sequence.new_zeros(len(mask))
    placed[last[last >= 0]] = per_sequence[last >= 0]
    return placed


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over masked tokens; 0 if there are none."""
    return torch.where(mask, values, 0).sum() / mask.sum().clamp(min=1)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Masked zero mean and unit (unbiased) variance; 0 where the mask is."""
    centred = torch.where(mask, values - masked_mean(values, mask), 0)
    variance = centred.square().sum() / (mask.sum() - 1).clamp(min=1)
    return centred * torch.rsqrt(variance + 1e-8)


@dataclass(frozen=True, slots=True)
class Grid:
    """Tokens of each sequence as rows of a rectangle, so that all sequences advance one step at a time.

    Only the tokens given by `mask` have a cell: gaps close, which is what "skip tokens with mask 0" means for a
    recursion. Cells beyond a sequence's end are 0.
    """

    tokens: Tensor  # [M] position in the packed batch of each cell that is used
    rows: Tensor  # [M] its sequence
    columns: Tensor  # [M] its step
    shape: tuple[int, int]  # (N, most steps of a sequence)

    @classmethod
    def of(cls, mask: Tensor, cu_seqlens: Tensor) -> Grid:
        tokens = mask.nonzero().squeeze(1)
        rows = sequence_ids(cu_seqlens)[tokens]
        counts = loss_token_counts(mask, cu_seqlens)
        columns = torch.arange(len(tokens), device=mask.device) - spread_counts(counts)
        return cls(tokens, rows, columns, (len(counts), int(counts.max()) if len(counts) else 0))

    def gather(self, values: Tensor) -> Tensor:
        """[T] -> [N, steps]."""
        grid = values.new_zeros(self.shape)
        grid[self.rows, self.columns] = values[self.tokens]
        return grid

    def scatter(self, grid: Tensor, num_tokens: int) -> Tensor:
        """[N, steps] -> [T], 0 where the mask is 0."""
        values = grid.new_zeros(num_tokens)
        values[self.tokens] = grid[self.rows, self.columns]
        return values


def spread_counts(counts: Tensor) -> Tensor:
    """For rows of `counts` cells laid end to end: where each cell's row starts, [sum of counts]."""
    return torch.repeat_interleave(counts.cumsum(0) - counts, counts)


def discounted_sum(steps: Tensor, decay: Tensor | float) -> Tensor:
    """y_t = x_t + decay y_{t+1} along the last axis of [N, steps]; `decay` is a number or one per row."""
    result = torch.empty_like(steps)
    carry = steps.new_zeros(steps.shape[0])
    for t in range(steps.shape[1] - 1, -1, -1):
        carry = steps[:, t] + decay * carry
        result[:, t] = carry
    return result


def reward_to_go(token_rewards: Tensor, mask: Tensor, cu_seqlens: Tensor, gamma: float = 1.0) -> Tensor:
    """Discounted sum of the rewards from each loss token on, [T]; one discount per loss token."""
    grid = Grid.of(mask, cu_seqlens)
    return grid.scatter(discounted_sum(grid.gather(token_rewards), gamma), len(mask))
