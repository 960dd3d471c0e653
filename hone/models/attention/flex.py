"""Soft-capped scores and attention sinks in torch's flex attention, which generates a kernel for them (Triton).

    packing --> `block_mask`: which keys each query sees, and which blocks of 128 x 128 scores exist at all
            --> flex attention over the row as it is: nothing of a shared prefix is copied
            --> a sink takes its weight from the result: out * sigmoid(log-sum-exp - sink)

On a CPU, flex attention has no backward and computes all scores at once; only the tests call it there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.utils._triton import has_triton

_BLOCK = 128  # queries and keys of a block; flex attention's default
_KERNELS = 64  # of one process: for each soft cap, number of heads, kind of layer, with and without gradients
_HEAD_SIZES = range(16, 257)  # what its kernels take


def fits(q: Tensor, v: Tensor) -> bool:
    """Return whether torch generates a kernel for these: in 16 bits, on a device that Triton compiles for."""
    half = q.dtype in (torch.bfloat16, torch.float16)
    return half and not q.is_cpu and q.shape[-1] in _HEAD_SIZES and v.shape[-1] in _HEAD_SIZES and has_triton()


def flex_packed(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """q [1, heads, T, d], k [1, kv_heads, T, d], v [1, kv_heads, T, dv], sinks [heads] -> [1, heads, T, dv]."""
    kernel: Any = flex_attention if q.is_cpu else _compiled()
    bend = None if softcap is None else _capped(softcap)
    grouped = q.shape[1] != k.shape[1]
    if sinks is None:
        out: Tensor = kernel(q, k, v, bend, mask, scale, grouped)
        return out
    out, found = kernel(q, k, v, bend, mask, scale, grouped, return_aux=AuxRequest(lse=True))
    kept = torch.sigmoid(found.lse - sinks.float().view(1, -1, 1))  # the weight that the sink leaves to the keys
    return (out * kept[..., None]).to(q.dtype)


@functools.cache
def _compiled(backend: str | Callable[..., Any] = "inductor") -> Callable[..., Any]:
    # With `fullgraph`, an error and not all scores in memory, should torch give up compiling for new lengths.
    compiled = torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=backend)

    def call(*args: Any, **named: Any) -> Any:
        # Otherwise `dynamic` makes a tensor of the soft cap too, which the generated kernel cannot read.
        most = max(torch._dynamo.config.recompile_limit, _KERNELS)
        with torch._dynamo.config.patch(specialize_float=True, recompile_limit=most):
            return compiled(*args, **named)

    return call


@functools.cache
def _capped(softcap: float) -> Callable[..., Tensor]:
    """One function for each softcap: a new one would make torch check again what it compiled."""

    def bend(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return bend


# ------------------------------------------------------------------------------------------- who sees what in a row


def block_mask(own: Tensor, prefix: tuple[Tensor, Tensor]) -> BlockMask:
    """The mask of a row in which query i sees the keys [own[i], i] and [prefix[0][i], prefix[1][i]), each [T] int32."""
    index = torch.arange(len(own), device=own.device)
    ranges = ((own, index + 1), prefix)
    some, whole = (_either(found) for found in zip(*(_blocks(*one) for one in ranges), strict=True))
    first, end = prefix

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return ((key >= own[query]) & (key <= query)) | ((key >= first[query]) & (key < end[query]))

    length = len(own)
    return BlockMask.from_kv_blocks(
        *_listed(some & ~whole), *_listed(whole), BLOCK_SIZE=_BLOCK, mask_mod=sees, seq_lengths=(length, length)
    )


def _either(found: Sequence[Tensor]) -> Tensor:
    return found[0] | found[1]


def _blocks(first: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """[blocks, blocks] bool twice: where a query of the block may see a key, and where each query sees every key.

    The first may be True without need: a block of queries counts as seeing all from its lowest to its highest key.
    """
    length = len(first)
    number = -(-length // _BLOCK)
    empty = first >= end
    starts = torch.arange(number, device=first.device) * _BLOCK
    lowest, highest = _padded(first.masked_fill(empty, length), length), _padded(end.masked_fill(empty, 0), 0)
    some = (lowest.amin(1)[:, None] < starts + _BLOCK) & (highest.amax(1)[:, None] > starts)
    latest, soonest = _padded(first.masked_fill(empty, length), 0), _padded(end.masked_fill(empty, 0), number * _BLOCK)
    return some, (latest.amax(1)[:, None] <= starts) & (soonest.amin(1)[:, None] >= starts + _BLOCK)


def _padded(values: Tensor, filling: int) -> Tensor:
    """[T] -> [blocks, 128], filled up."""
    return F.pad(values, (0, -len(values) % _BLOCK), value=filling).view(-1, _BLOCK)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[blocks, blocks] bool -> how many are True in each row, and the True ones first: [1, 1, blocks (, blocks)]."""
    order = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


def ranges(runs: Sequence[Any], window: int | None, device: torch.device) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """For each token the first key that it sees of its own segment; the first of its prefix, and the end of these.

    `runs` are those of a `Packing`.
    """
    window = window or sum(run.count * run.length for run in runs)
    starts: list[int] = []
    parts: list[Tensor] = []
    for run in runs:
        starts.append(starts[-1] + parts[-1].shape[1] if parts else 0)
        position = torch.arange(run.length, device=device)
        segment = starts[-1] + torch.arange(run.count, device=device)[:, None] * run.length
        own = segment + (position - window + 1).clamp(min=0)
        prefix = torch.zeros_like(segment) if run.rows is None else starts[run.source] + run.rows[:, None] * run.prefix
        first = prefix + (run.prefix + position - window + 1).clamp(min=0)
        parts.append(torch.stack([x.expand_as(own).flatten() for x in (own, first, prefix + run.prefix)]))
    own, first, end = torch.cat(parts, 1).to(torch.int32)
    return own, (first, end)
