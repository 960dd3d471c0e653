"""Estimators of KL(policy, reference) per token, from samples of the policy.

Source: http://joschu.net/blog/kl-approx.html. In a loss, k1 has zero gradient on average, and k3 has the gradient of
KL(reference, policy). A `+` keeps the value of its kind but takes the gradient of k2, which is the correct gradient for
on-policy samples (arXiv 2506.09477).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hone.algorithms.settings import KlKind

LOG_RATIO_LIMIT = 20.0  # exp(20) is 5e8; above it, one token would dominate the loss


def kl_penalty(lp: Tensor, ref: Tensor, kind: KlKind) -> Tensor:
    """KL estimate per token, [T]. Raises ValueError for kind `full`: use `full_kl`."""
    value = _value(lp, ref, kind.removesuffix("+"))
    return straight_through(value, lp, ref) if kind.endswith("+") else value


def straight_through(value: Tensor, lp: Tensor, ref: Tensor) -> Tensor:
    """The value of one estimator with the gradient of k2."""
    k2 = 0.5 * (lp - ref).square()
    return k2 + (value - k2).detach()


def _value(lp: Tensor, ref: Tensor, kind: str) -> Tensor:
    log_ratio = lp - ref
    match kind:
        case "k1":
            return log_ratio
        case "abs":
            return log_ratio.abs()
        case "k2":
            return 0.5 * log_ratio.square()
        case "k3":
            inverse = (-log_ratio).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            return inverse.exp() - inverse - 1
    raise ValueError(f"KL kind {kind!r} cannot be computed from two log-probs per token")


def full_kl(logits: Tensor, ref_logits: Tensor, chunk_tokens: int = 1024) -> Tensor:
    """Exact KL(policy, reference) over the vocabulary: two [T, V] -> [T], computed `chunk_tokens` rows at a time."""
    parts = zip(torch.split(logits, chunk_tokens), torch.split(ref_logits, chunk_tokens), strict=True)
    return torch.cat([_full_chunk(rows, ref_rows) for rows, ref_rows in parts])


def _full_chunk(logits: Tensor, ref_logits: Tensor) -> Tensor:
    lp, ref = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return (lp.exp() * (lp - ref)).sum(-1)


def adapt_coef(coef: float, measured: float, target: float, horizon: int, sequences: int) -> float:
    """Next coefficient of an adaptive penalty, which changes by at most 20 % per `horizon` sequences.

    Source: arXiv 1909.08593, section 2.2.
    """
    error = min(max(measured / target - 1, -0.2), 0.2)
    return coef * (1 + error * sequences / horizon)
