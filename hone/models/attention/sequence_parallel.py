"""Ulysses: ranks split the tokens of a packed row; inside attention each rank has all tokens of some heads.

    rank i      its slice of the row --model--> queries, keys, values [1, heads, T_i, d]
                    all-to-all --> [1, heads / ranks, T, d] --attention--> all-to-all --> [1, heads, T_i, d]

Only attention mixes tokens, so only attention exchanges data. Slices may differ in length.
Source: DeepSpeed Ulysses (Jacobs et al. 2023, https://arxiv.org/abs/2309.14509).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SequenceRanks:
    """The ranks that share a row, from the view of one of them."""

    group: Any  # process group
    rank: int
    size: int

    def slices(self, length: int) -> list[int]:
        """Number of tokens of each rank, for a row of `length` tokens."""
        return [length * (i + 1) // self.size - length * i // self.size for i in range(self.size)]

    def own(self, row: Tensor) -> Tensor:
        """This rank's slice, along the first dimension, of a complete row."""
        return row[self.start(len(row)) :][: self.slices(len(row))[self.rank]]

    def start(self, length: int) -> int:
        """The start of this rank's slice."""
        return length * self.rank // self.size

    def to_heads(self, x: Tensor, length: int) -> Tensor:
        """[1, heads, T_i, d] -> [1, heads / size, length, d]; fewer heads than ranks are repeated."""
        if x.shape[1] < self.size:
            x = x.repeat_interleave(self.size // x.shape[1], 1)
        tokens = x[0].transpose(0, 1)  # [T_i, heads, d]
        to_each = torch.cat([part.reshape(-1) for part in tokens.chunk(self.size, 1)])
        width = x.shape[1] // self.size * x.shape[3]
        sizes = self.slices(length)
        received = _exchange(to_each, [tokens.shape[0] * width] * self.size, [n * width for n in sizes], self.group)
        return received.view(length, x.shape[1] // self.size, x.shape[3]).transpose(0, 1)[None]

    def to_tokens(self, x: Tensor) -> Tensor:
        """[1, heads / size, T, d] -> [1, heads, T_i, d]: the inverse of `to_heads`."""
        tokens = x[0].transpose(0, 1)  # [T, heads / size, d]
        sizes = self.slices(len(tokens))
        mine, width = sizes[self.rank], x.shape[1] * x.shape[3]
        received = _exchange(tokens.reshape(-1), [n * width for n in sizes], [mine * width] * self.size, self.group)
        by_rank = received.view(self.size, mine, x.shape[1], x.shape[3])
        return by_rank.transpose(0, 1).reshape(mine, -1, x.shape[3]).transpose(0, 1)[None]

    def whole(self, values: Tensor) -> Tensor:
        """Sum [T, ...] over ranks, where each rank has zeros outside its own tokens.

        All ranks then compute the same, so the backward passes each rank its own tokens' gradient unchanged.
        """
        return _Whole.apply(values, self.group)  # type: ignore[no-any-return, no-untyped-call]


_CURRENT: ContextVar[SequenceRanks | None] = ContextVar("hone_sequence_ranks")


@contextmanager
def shared_by(ranks: SequenceRanks | None) -> Iterator[None]:
    """Inside this context, `ranks` share the rows of a forward; None: each rank has its own rows."""
    token = _CURRENT.set(ranks)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_ranks() -> SequenceRanks | None:
    return _CURRENT.get(None)


def _exchange(flat: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    return _AllToAll.apply(flat, sent, received, group)  # type: ignore[no-any-return, no-untyped-call]


class _AllToAll(torch.autograd.Function):
    """`all_to_all_single` of unequal parts; the backward sends each part back."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        out = flat.new_empty(sum(received))
        dist.all_to_all_single(out, flat.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        out = grads[0].new_empty(sum(ctx.sent))
        dist.all_to_all_single(out, grads[0].contiguous(), ctx.sent, ctx.received, group=ctx.group)
        return out, None, None, None


class _Whole(torch.autograd.Function):
    """Sum over ranks forward, nothing backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
