"""Reductions over the sequences of a packed batch. Shapes: T tokens, N sequences, `cu_seqlens` [N+1].

All functions keep the dtype and the gradient of their input.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hone.spans import repeat
from hone.types import Batch


def sequence_ids(cu_seqlens: Tensor) -> Tensor:
    """Number of each token's sequence, [T]."""
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    return repeat(torch.arange(len(lengths), device=cu_seqlens.device), lengths)


def compared(batch: Batch) -> Tensor:
    """Number of each sequence's group, [N] from 0: answers to one prompt in one role, whose rewards are compared."""
    keys = batch.group_index[None]
    if batch.role_index is not None:
        keys = torch.stack((batch.group_index, batch.role_index))
    number: Tensor = torch.unique(keys, dim=1, return_inverse=True)[1]
    return number


def spread(per_sequence: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Each sequence's value on all of its tokens, [N] -> [T]."""
    return repeat(per_sequence, cu_seqlens[1:] - cu_seqlens[:-1])


def sequence_sum(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum over each sequence, [T] -> [N]."""
    return values.new_zeros(len(cu_seqlens) - 1).index_add(0, sequence_ids(cu_seqlens), values)


def sequence_mean(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Mean over each sequence's masked tokens, [T] -> [N]; 0 for a sequence without any."""
    total = sequence_sum(torch.where(mask, values, 0), cu_seqlens)
    return total / sequence_sum(mask.to(values.dtype), cu_seqlens).clamp(min=1)


def sequence_extreme(values: Tensor, mask: Tensor, cu_seqlens: Tensor, largest: bool = True) -> Tensor:
    """Largest (or smallest) masked value of each sequence, [T] -> [N]; -inf (inf) for a sequence without any."""
    start = values.new_full((len(cu_seqlens) - 1,), -torch.inf if largest else torch.inf)
    ids = sequence_ids(cu_seqlens)[mask]
    return start.scatter_reduce(0, ids, values[mask], "amax" if largest else "amin")


def loss_token_counts(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Number of loss tokens of each sequence, [N] int64."""
    before = torch.searchsorted(mask.nonzero().squeeze(1), cu_seqlens)
    return before[1:] - before[:-1]


def on_last_loss_token(per_sequence: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Each sequence's value on its last loss token, 0 elsewhere, [N] -> [T]; dropped if it has no loss token."""
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
    """Scale masked values to mean 0 and (unbiased) variance 1; 0 outside the mask."""
    centred = torch.where(mask, values - masked_mean(values, mask), 0)
    variance = centred.square().sum() / (mask.sum() - 1).clamp(min=1)
    return centred * torch.rsqrt(variance + 1e-8)


@dataclass(frozen=True, slots=True)
class Grid:
    """The masked tokens of each sequence as a row of a rectangle, to compare the sequences step by step.

    Tokens outside the mask leave no gap. Cells beyond a sequence's end are 0.
    """

    tokens: Tensor  # [M] position in the packed batch of each used cell
    rows: Tensor  # [M] its sequence
    columns: Tensor  # [M] its step
    shape: tuple[int, int]  # (N, most steps of a sequence)

    @classmethod
    def of(cls, mask: Tensor, cu_seqlens: Tensor) -> Grid:
        tokens = mask.nonzero().squeeze(1)
        rows = sequence_ids(cu_seqlens)[tokens]
        counts = loss_token_counts(mask, cu_seqlens)
        columns = torch.arange(len(tokens), device=mask.device) - _first_of_row(counts)
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


@dataclass(frozen=True, slots=True)
class Staircase:
    """The masked tokens of all sequences, step after step, for recursions backwards from each sequence's last token.

        step 0: a0 b0 c0 | step 1: a1 b1 | step 2: a2          the longest sequence first: no cell is empty

    A recursion skips tokens outside the mask. Inputs and outputs are [M], the M masked tokens in the batch's order.
    """

    tokens: Tensor  # [M] position in the packed batch
    counts: Tensor  # [N] tokens of each sequence
    _rows: Tensor  # [N] sequences, the longest first
    _cells: Tensor  # [M] the cell of each token
    _heights: tuple[int, ...]  # number of sequences that have each step

    @classmethod
    def of(cls, mask: Tensor, cu_seqlens: Tensor) -> Staircase:
        tokens, counts = mask.nonzero().squeeze(1), loss_token_counts(mask, cu_seqlens)
        rows = counts.argsort(descending=True, stable=True)
        rank = torch.empty_like(rows).index_copy(0, rows, torch.arange(len(rows), device=rows.device))
        heights = len(counts) - torch.bincount(counts).cumsum(0)[:-1]
        steps = torch.arange(len(tokens), device=mask.device).sub_(_first_of_row(counts))
        cells = (heights.cumsum(0) - heights).index_select(0, steps).add_(repeat(rank, counts))
        return cls(tokens, counts, rows, cells, tuple(heights.tolist()))

    def following(self, values: Tensor) -> Tensor:
        """The value of the next token of the same sequence, 0 after the last one."""
        after = torch.zeros_like(values)
        after[:-1] = values[1:]
        after[self.counts.cumsum(0)[self.counts > 0] - 1] = 0
        return after

    def discounted_sum(self, values: Tensor, decay: Tensor | float) -> Tensor:
        """y_t = x_t + decay y_{t+1} in each sequence; `decay` is a number or one per sequence."""
        cells = torch.empty_like(values).index_copy_(0, self._cells, values)
        factors = decay[self._rows] if isinstance(decay, Tensor) else None
        after = len(cells) - (self._heights[-1] if self._heights else 0)  # where the step after this one begins
        for height, reach in zip(self._heights[-2::-1], self._heights[:0:-1], strict=True):
            here, later = cells[after - height :][:reach], cells[after : after + reach]
            if factors is None:
                here.add_(later, alpha=float(decay))
            else:
                here.addcmul_(later, factors[:reach])
            after -= height
        return cells.index_select(0, self._cells)

    def on_tokens(self, values: Tensor, num_tokens: int) -> Tensor:
        """[M] -> [T], 0 where the mask is 0."""
        return values.new_zeros(num_tokens).index_copy_(0, self.tokens, values)


def _first_of_row(counts: Tensor) -> Tensor:
    """Start of each cell's row, for rows of `counts` cells laid end to end, [sum of counts]."""
    return repeat(counts.cumsum(0) - counts, counts)


def reward_to_go(token_rewards: Tensor, mask: Tensor, cu_seqlens: Tensor, gamma: float = 1.0) -> Tensor:
    """Sum of the rewards from each loss token on, discounted once per loss token, [T]."""
    stairs = Staircase.of(mask, cu_seqlens)
    return stairs.on_tokens(stairs.discounted_sum(token_rewards[stairs.tokens], gamma), len(mask))


def in_dtype_of(rewards: Tensor | None, values: Tensor | None) -> Tensor | None:
    """Values computed from rewards of turns, which are float64, in the dtype of the batch's rewards."""
    return values if values is None or rewards is None else values.to(rewards.dtype)
