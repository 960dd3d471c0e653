"""Causal attention that computes its scores for one tile of queries at a time.

    forward     of each tile: scores -> weights -> output; no scores are kept
    backward    of each tile: scores -> weights once more -> gradients of queries, keys, values and sinks

For soft caps and attention sinks (memory grows with the number of keys, not with its square), and on a CPU for plain
bfloat16 attention with gradients: torch's backward, and its forward where the processor multiplies bfloat16, take twice
to five times as long. In float32 torch's kernel is faster.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.models.numerics.products import prepare

_TILE = 128  # query rows per head at a time
_SCORES = 1 << 18  # scores of several rows at a time on a CPU; they stay in a core's cache
_SCORES_OF_A_ROW = 1 << 22  # on a CPU; 16 MiB in float32
_SCORES_ELSEWHERE = 1 << 24  # enough to keep a GPU busy; 64 MiB in float32


def speeds_up(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether plain attention should be computed here: bfloat16 on a CPU, with gradients."""
    wanted = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return wanted and q.device.type == "cpu" and q.dtype == torch.bfloat16


def tiled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [rows, heads, length, d], k [rows, kv_heads, keys, d], v [.., dv], sinks [heads] -> [rows, heads, length, dv].

    The queries are at the last positions of the keys: query i sees keys up to keys - length + i.
    """
    rule = _Rule(scale, window or k.shape[2], softcap)
    out: Tensor = _Tiled.apply(q, k, v, sinks, rule)  # type: ignore[no-untyped-call]
    return out


def causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """The mask for torch's kernels; None if their own causal mask is the same."""
    if queries == keys and (window is None or window >= keys):
        return None
    return band(queries, keys, window or keys, device)


def band(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """[queries, keys] bool: True where query i, at p = keys - queries + i, may see key j: p - window < j <= p."""
    before = keys - queries
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril_(before).triu_(before + 1 - window)


class _Rule(NamedTuple):
    """Computation of scores from queries and keys."""

    scale: float
    window: int
    softcap: float | None


class _Tiled(torch.autograd.Function):
    """Keeps only queries, keys, values and sinks; the backward recomputes the attention weights tile by tile."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, rule: _Rule) -> Tensor:
        ctx.save_for_backward(q, k, v, sinks)
        ctx.rule = rule
        if sinks is None and rule.softcap is None and (q.dtype != torch.bfloat16 or prepare(q.dtype) != "torch"):
            mask = causal_mask(q.shape[2], k.shape[2], rule.window, q.device)
            return F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=mask is None, scale=rule.scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        out = _token_major(q, v.shape[-1])
        for rows, heads, kv_heads in _pieces(q, k):
            own = None if sinks is None else sinks[heads]
            _forward_piece(q[rows, heads], k[rows, kv_heads], v[rows, kv_heads], own, rule, out[rows, heads])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks = ctx.saved_tensors
        found = [_token_major(x, x.shape[-1]) for x in (q, k, v)]
        of_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=_wide(q.dtype))
        for rows, heads, kv_heads in _pieces(q, k):
            where = (rows, heads), (rows, kv_heads), (rows, kv_heads)
            inputs = [x[at] for x, at in zip((q, k, v), where, strict=True)]
            outputs = [x[at] for x, at in zip(found, where, strict=True)]
            own = None if sinks is None else sinks[heads]
            shares = _backward_piece(inputs, grads[0][rows, heads], own, ctx.rule, outputs)
            if of_sinks is not None and shares is not None:
                of_sinks[heads] -= shares
        return *found, None if of_sinks is None else of_sinks.to(sinks.dtype), None


def _token_major(like: Tensor, size: int) -> Tensor:
    """An empty [rows, heads, length, size] in token-major memory, which the following projections read fastest."""
    rows, heads, length, _ = like.shape
    return like.new_empty(rows, length, heads, size).transpose(1, 2)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _pieces(q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """Rows, query heads and key-value heads that are computed at once: several rows, or some heads of one."""
    rows, kv_heads, groups = q.shape[0], k.shape[1], q.shape[1] // k.shape[1]
    scores = groups * min(_TILE, q.shape[2]) * k.shape[2]  # of a key-value head, in one tile
    limits = (_SCORES, _SCORES_OF_A_ROW) if q.device.type == "cpu" else (_SCORES_ELSEWHERE, _SCORES_ELSEWHERE)
    many_rows = max(1, limits[0] // (scores * kv_heads))
    many_heads = min(kv_heads, max(1, limits[1] // scores))
    for row in range(0, rows, many_rows):
        for head in range(0, kv_heads, many_heads):
            own = slice(head, min(head + many_heads, kv_heads))
            yield slice(row, row + many_rows), slice(own.start * groups, own.stop * groups), own


def _tiles(q: Tensor, k: Tensor, window: int) -> Iterator[tuple[slice, slice]]:
    """The queries of each tile, and the keys that at least one of them sees."""
    length, before = q.shape[2], k.shape[2] - q.shape[2]
    for start in range(0, length, _TILE):
        end = min(start + _TILE, length)
        yield slice(start, end), slice(max(0, before + start - window + 1), before + end)


def _stacked(x: Tensor, tile: slice, kv_heads: int) -> Tensor:
    """A tile of [rows, heads, length, d] as [rows * kv_heads, heads / kv_heads * tile, d].

    The query heads that share a key-value head are stacked, so that each matrix product has more rows.
    """
    part = x[:, :, tile]
    return part.reshape(x.shape[0] * kv_heads, x.shape[1] // kv_heads * part.shape[2], x.shape[3])


def _forward_piece(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, rule: _Rule, out: Tensor) -> None:
    kv_heads = k.shape[1]
    keys, values = (x.reshape(-1, k.shape[2], x.shape[-1]) for x in (k, v))
    for tile, seen in _tiles(q, k, rule.window):
        found = _weigh(_stacked(q, tile, kv_heads), keys[:, seen], sinks, rule, tile.stop - tile.start)
        out[:, :, tile] = torch.bmm(found.weights.to(v.dtype), values[:, seen]).view(out[:, :, tile].shape)


def _backward_piece(
    inputs: list[Tensor], grad: Tensor, sinks: Tensor | None, rule: _Rule, outputs: list[Tensor]
) -> Tensor | None:
    """Write the gradients of q, k and v, given q, k, v and the gradient of the output.

    Returns minus the gradient of the sinks, [heads].
    """
    q, k, v = inputs
    to_q, to_k, to_v = outputs
    keys, values = (x.reshape(-1, k.shape[2], x.shape[-1]) for x in (k, v))
    of_keys, of_values = (torch.zeros_like(x, dtype=_wide(x.dtype)) for x in (keys, values))
    of_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=_wide(q.dtype))
    for tile, seen in _tiles(q, k, rule.window):
        queries, upstream = (_stacked(x, tile, k.shape[1]) for x in (q, grad))
        found = _weigh(queries, keys[:, seen], sinks, rule, tile.stop - tile.start)
        of_weights = torch.bmm(upstream, values[:, seen].mT)
        of_scores, shares = _of_scores(found, of_weights, q.dtype)
        to_q[:, :, tile] = torch.bmm(of_scores, keys[:, seen]).mul_(rule.scale).view(to_q[:, :, tile].shape)
        of_values[:, seen] += torch.bmm(found.weights.to(v.dtype).mT, upstream)
        of_keys[:, seen] += torch.bmm(of_scores.mT, queries)
        if of_sinks is not None and shares is not None:
            of_sinks += shares.view(*q.shape[:2], -1).sum((0, 2))
    to_k.copy_(of_keys.mul_(rule.scale).view(k.shape))
    to_v.copy_(of_values.view(v.shape))
    return of_sinks


# ---------------------------------------------------------------------------------------------- scores of one tile


class _Weights(NamedTuple):
    """Attention weights of one tile's queries: [rows * kv_heads, stacked queries, keys].

    In float32 (float64 for inputs in float64), except for plain scores: these are in the dtype of the inputs.
    """

    weights: Tensor
    bent: Tensor | None = None  # scores / softcap after tanh
    sink: Tensor | None = None  # [.., stacked queries, 1]: the weight of the sink


def _weigh(queries: Tensor, keys: Tensor, sinks: Tensor | None, rule: _Rule, tile: int) -> _Weights:
    """`tile` is the number of queries of each head; the last query sees the last key."""
    if rule.softcap is None and sinks is None:
        hidden = _hidden(tile, keys.shape[1], rule.window, keys.dtype, keys.device)
        hidden = hidden.repeat(queries.shape[1] // tile, 1)
        return _Weights(torch.softmax(torch.baddbmm(hidden, queries, keys.mT, alpha=rule.scale), -1))
    scores, bent = torch.bmm(queries, keys.mT).to(_wide(keys.dtype)), None
    if rule.softcap is None:
        scores *= rule.scale
    else:
        bent = scores.mul_(rule.scale / rule.softcap).tanh_()
        scores = bent * rule.softcap
    hidden = ~band(tile, keys.shape[1], rule.window, keys.device)
    scores.view(len(keys), -1, *hidden.shape).masked_fill_(hidden, float("-inf"))
    if sinks is None:
        return _Weights(torch.softmax(scores, -1), bent)
    kv_heads = len(sinks) * tile // queries.shape[1]
    column = sinks.to(scores.dtype).view(1, kv_heads, -1, 1).expand(len(keys) // kv_heads, -1, -1, tile)
    whole = torch.softmax(torch.cat([scores, column.reshape(*scores.shape[:2], 1)], -1), -1)
    return _Weights(whole[..., :-1], bent, whole[..., -1:])


def _of_scores(found: _Weights, of_weights: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The gradient of queries times keys (times scale), and minus that of the sink's score for each query."""
    weights, bent, sink = found
    if bent is None and sink is None:
        return torch._softmax_backward_data(of_weights, weights, -1, dtype), None
    of_weights = of_weights.to(weights.dtype)
    mean = (weights * of_weights).sum(-1, keepdim=True)
    of_scores = (of_weights - mean).mul_(weights)
    if bent is not None:
        of_scores *= 1 - bent.square()  # the derivative of softcap * tanh(scores / softcap)
    return of_scores.to(dtype), None if sink is None else sink * mean


@functools.lru_cache(maxsize=64)
def _hidden(queries: int, keys: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[queries, keys]: 0 where a query may see a key, minus infinity elsewhere."""
    visible = band(queries, keys, window, device)
    return torch.zeros(queries, keys, dtype=dtype, device=device).masked_fill_(~visible, float("-inf"))
