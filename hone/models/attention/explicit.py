"""Attention weights written out, where no kernel computes them: all scores of a call are in memory at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.models.attention.tiled import band


def attention_weights(scores: Tensor, hidden: Tensor, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """Weights of the keys, of the shape of `scores` [.., queries, keys], in float32 at least.

    `hidden` is added to the scores: minus infinity where a query may not look; `sinks` broadcasts to [.., queries, 1].
    """
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + hidden
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], -1)
    weights = F.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return weights if sinks is None else weights[..., :-1]


def attend_explicitly(q: Tensor, k: Tensor, v: Tensor, scoring: Any) -> Tensor:
    """Attention written out, for dropout of weights that no kernel computes: [rows, heads, length, keys] at once."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    visible = band(q.shape[2], k.shape[2], scoring.window or k.shape[2], q.device)
    hidden = torch.zeros_like(visible, dtype=q.dtype).masked_fill(~visible, float("-inf"))
    sinks = None if scoring.sinks is None else scoring.sinks.view(1, -1, 1, 1)
    weights = attention_weights((q @ k.transpose(-1, -2)) * scoring.scale, hidden, scoring.softcap, sinks)
    return F.dropout(weights.to(v.dtype), scoring.dropout) @ v


def attend_hidden(queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, scoring: Any) -> Tensor:
    """Queries [rows, kv_heads, groups, d] over a cache, with the mask of a decode step; `scoring` is a `Scoring`."""
    sinks = None if scoring.sinks is None else scoring.sinks.view(1, *queries.shape[1:3], 1)
    weights = attention_weights((queries @ keys.transpose(-1, -2)) * scoring.scale, hidden, scoring.softcap, sinks)
    return weights.to(values.dtype) @ values
