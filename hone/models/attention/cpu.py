"""Causal attention in bfloat16 on a CPU: torch's forward kernel, and a backward with batched matrix products.

torch's bfloat16 backward for CPUs does not use the matrix units well: it takes five times as long as the products below
at 80 tokens per sequence, and one and a half times at 500. In float32 torch's kernel is faster and is used.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_TILE = 128  # query rows per head at a time
_SCORES = 1 << 18  # scores at a time; they stay in a core's cache


def fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether to use this backward: bfloat16 on a CPU, with gradients."""
    wanted = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return wanted and q.device.type == "cpu" and q.dtype == torch.bfloat16


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """q [rows, heads, length, d], k [rows, kv_heads, keys, d], v [.., dv] -> [rows, heads, length, dv].

    The queries are at the last positions of the keys: query i sees keys up to keys - length + i.
    """
    out: Tensor = _Causal.apply(q, k, v, scale, window)  # type: ignore[no-untyped-call]
    return out


def causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """The mask for torch's kernels; None if their own causal mask is the same."""
    if queries == keys and (window is None or window >= keys):
        return None
    return band(queries, keys, window or keys, device)


def band(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """[queries, keys] bool: True where query i, whose position is p = keys - queries + i, may see key j.

    That is where p - window < j <= p.
    """
    before = keys - queries
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril_(before).triu_(before + 1 - window)


class _Causal(torch.autograd.Function):
    """Keeps only queries, keys and values; the backward recomputes the attention weights tile by tile."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.scale, ctx.window = scale, window or k.shape[2]
        mask = causal_mask(q.shape[2], k.shape[2], window, q.device)
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v = ctx.saved_tensors
        gradients = _token_major(q), _token_major(k), _token_major(v)
        rows = max(1, _SCORES // (q.shape[1] * min(_TILE, q.shape[2]) * k.shape[2]))
        inputs = zip(*(torch.split(x, rows) for x in (q, k, v, grads[0])), strict=True)
        outputs = zip(*(torch.split(x, rows) for x in gradients), strict=True)
        for given, wanted in zip(inputs, outputs, strict=True):
            _backward_rows(given, wanted, ctx.scale, ctx.window)
        return *gradients, None, None


def _token_major(like: Tensor) -> Tensor:
    """An empty [rows, heads, length, d] in token-major memory, which the following projections read fastest."""
    rows, heads, length, size = like.shape
    return like.new_empty(rows, length, heads, size).transpose(1, 2)


def _backward_rows(inputs: Sequence[Tensor], outputs: Sequence[Tensor], scale: float, window: int) -> None:
    """Write the gradients of q, k and v for some rows, given q, k, v and the gradient of the output.

    The query heads that share a key-value head are stacked in each product.
    """
    q, k, v, grad = inputs
    to_q, to_k, to_v = outputs
    rows, heads, length, size = q.shape
    groups, before = heads // k.shape[1], k.shape[2] - length
    keys, values = (x.reshape(-1, k.shape[2], x.shape[-1]) for x in (k, v))
    of_keys, of_values = (torch.zeros(x.shape, dtype=torch.float32) for x in (keys, values))
    for start in range(0, length, _TILE):
        end = min(start + _TILE, length)
        seen = slice(max(0, before + start - window + 1), before + end)
        queries = q[:, :, start:end].reshape(len(keys), groups * (end - start), size)
        upstream = grad[:, :, start:end].reshape(len(keys), groups * (end - start), v.shape[-1])
        hidden = _hidden(end - start, seen.stop - seen.start, window, q.dtype).repeat(groups, 1)
        scores = torch.baddbmm(hidden, queries, keys[:, seen].mT, alpha=scale)
        weights = torch.softmax(scores, -1)
        of_weights = torch.bmm(upstream, values[:, seen].mT)
        of_scores = torch._softmax_backward_data(of_weights, weights, -1, q.dtype)
        to_q[:, :, start:end] = torch.bmm(of_scores, keys[:, seen]).mul_(scale).view(rows, heads, end - start, size)
        of_values[:, seen] += torch.bmm(weights.mT, upstream)
        of_keys[:, seen] += torch.bmm(of_scores.mT, queries)
    to_k.copy_(of_keys.mul_(scale).view(k.shape))
    to_v.copy_(of_values.view(v.shape))


@functools.lru_cache(maxsize=64)
def _hidden(queries: int, keys: int, window: int, dtype: torch.dtype) -> Tensor:
    """[queries, keys]: 0 where a query may see a key, minus infinity elsewhere."""
    visible = band(queries, keys, window, torch.device("cpu"))
    return torch.zeros(queries, keys, dtype=dtype).masked_fill_(~visible, float("-inf"))
