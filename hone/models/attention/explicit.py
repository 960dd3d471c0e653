"""Attention weights written out, where no kernel computes them: all scores of a call are in memory at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
