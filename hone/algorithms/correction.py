"""Rollout correction for the difference between the policy that generated and the policy being trained.

Kernels, precision and staleness make the rollout engine's log-probs `roll` differ from the trainer's `old`. Metrics
always measure this gap; importance weights and rejection rules correct it if set. R = exp(old - roll), per token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hone.algorithms.kl import LOG_RATIO_LIMIT
from hone.algorithms.segments import (
    loss_token_counts,
    masked_mean,
    sequence_extreme,
    sequence_mean,
    sequence_sum,
    spread,
)
from hone.algorithms.settings import CorrectionSettings, RejectionSettings
from hone.spans import cumulative
from hone.types import Extra, Metric, Metrics, merge_metrics

IS_WEIGHTS = Extra("is_weights")  # importance weights of the token losses, [T], if they need the whole batch
_IN_CACHE = 1 << 17  # tokens per block of `mismatch`: a dozen intermediate results of a block fit into the CPU cache
DEFAULT_BAND = (0.5, 2.0)  # for the metric `correction/outside_band` if no band is set


def importance_weights(
    old: Tensor, rollout: Tensor, mask: Tensor, cu_seqlens: Tensor, settings: CorrectionSettings
) -> Tensor:
    """Weights of the token losses, [T], detached, 0 outside the mask.

    `token`: R; `sequence`: the product of R over the sequence, on all of its tokens. `truncate: c` is min(., c) (TIS),
    `band: [lo, hi]` gives 0 outside (IcePop, arXiv 2510.18855). `normalized` divides by the mean of the whole batch.
    """
    log_ratio = clamped_log_ratio(old.detach(), rollout, mask)
    if settings.weights == "sequence":
        log_ratio = spread(sequence_sum(log_ratio, cu_seqlens), cu_seqlens)
    weights = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if settings.truncate is not None:
        weights = weights.clamp(max=settings.truncate)
    if settings.band is not None:
        low, high = settings.band
        weights = torch.where((weights >= low) & (weights <= high), weights, 0)
    return torch.where(mask, weights, 0)


def normalized(weights: Tensor, mask: Tensor) -> Tensor:
    """Weights divided by their mean over the batch's loss tokens."""
    return weights / masked_mean(weights, mask).clamp(min=1e-8)


def accepted(
    old: Tensor,
    rollout: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    rules: Sequence[RejectionSettings],
    advantages: Tensor | None = None,
) -> Tensor:
    """The loss tokens that all rules keep, [T] bool; a sequence-level rule keeps or drops whole sequences.

    `old` are the log-probs of the policy compared with the rollout. A rule for negative `advantages` [T] keeps all
    other tokens, as in DeepSeek-V3.2's off-policy sequence masking (arXiv 2512.02556).
    """
    log_ratio = clamped_log_ratio(old, rollout, mask)
    kept = mask
    for rule in rules:
        keeps = _keeps(rule, log_ratio, mask, cu_seqlens)
        if rule.advantages == "negative" and advantages is not None:
            keeps = keeps | (advantages >= 0)
        kept = kept & keeps
    return kept


def _keeps(rule: RejectionSettings, log_ratio: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Tokens that a rule keeps, [T]; k1 bounds the ratio by log(low) <= log R <= log(high)."""
    if rule.statistic == "k1":
        statistic = log_ratio
        low = -math.inf if rule.low is None else math.log(rule.low)
        high = math.inf if rule.high is None else math.log(rule.high)
    else:
        statistic = _divergence(rule.statistic, log_ratio)
        low, high = -math.inf, math.inf if rule.high is None else rule.high
    match rule.level:
        case "token":
            return (statistic >= low) & (statistic <= high)
        case "sequence_sum":
            total = sequence_sum(torch.where(mask, statistic, 0), cu_seqlens)
            smallest = largest = total
        case "sequence_mean":
            smallest = largest = sequence_mean(statistic, mask, cu_seqlens)
        case "sequence_max":
            smallest = sequence_extreme(statistic, mask, cu_seqlens, largest=False)
            largest = sequence_extreme(statistic, mask, cu_seqlens)
    return spread((smallest >= low) & (largest <= high), cu_seqlens)


def _divergence(kind: str, log_ratio: Tensor) -> Tensor:
    """Non-negative estimate of KL(rollout, trainer) per token of a rollout sample."""
    if kind == "k2":
        return 0.5 * log_ratio.square()
    return log_ratio.exp() - log_ratio - 1


def clamped_log_ratio(old: Tensor, rollout: Tensor, mask: Tensor) -> Tensor:
    """log(trainer / rollout) of each token, clamped to finite limits, 0 outside the mask, [T]."""
    return torch.where(mask, old - rollout, 0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def mismatch_tokens(log_ratio: Tensor, band: tuple[float, float] | None = None) -> dict[str, Tensor]:
    """Metrics of the gap that are means over tokens, each [T]."""
    ratio = log_ratio.exp()
    low, high = band or DEFAULT_BAND
    return {
        "correction/kl": -log_ratio,
        "correction/k3": ratio - log_ratio - 1,
        "correction/mean_abs_difference": log_ratio.abs(),
        "correction/chi2_token": ratio.square() - 1,
        "correction/outside_band": ((ratio < low) | (ratio > high)).to(ratio.dtype),
    }


def mismatch_sequences(
    log_ratio: Tensor, old: Tensor, rollout: Tensor, mask: Tensor, cu_seqlens: Tensor
) -> dict[str, Tensor]:
    """Metrics of the gap that are means over sequences with a loss token, each [N]."""
    sums = sequence_sum(log_ratio, cu_seqlens).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    trainer, roll = (sequence_mean(x, mask, cu_seqlens) for x in (old, rollout))
    return {
        "correction/chi2_sequence": (2 * sums).exp() - 1,
        "correction/trainer_perplexity": (-trainer).exp(),
        "correction/rollout_perplexity": (-roll).exp(),
        "correction/log_perplexity_difference": roll - trainer,
    }


def mismatch_largest(log_ratio: Tensor) -> dict[str, Tensor]:
    """Metrics of the gap that are maxima over tokens, each [T]."""
    return {"correction/max_abs_difference": log_ratio.abs()}


def mismatch(
    old: Tensor, rollout: Tensor, mask: Tensor, cu_seqlens: Tensor, band: tuple[float, float] | None = None
) -> Metrics:
    """Metrics of the gap between rollout and trainer over the loss tokens of a batch.

    kl and k3 estimate KL(rollout, trainer) in nats per token; chi2 is the chi-squared divergence per token and per
    sequence; ess is the effective sample size as a share of the tokens; perplexities are means over sequences.
    Empty if the batch has no loss token.
    """
    tokens = int(mask.sum())
    if not tokens:
        return {}
    counts = loss_token_counts(mask, cu_seqlens)
    counts = counts[counts > 0]
    at = mask.nonzero().squeeze(1)  # from here on, only loss tokens
    old, rollout = old.index_select(0, at).double(), rollout.index_select(0, at).double()
    mask, cu_seqlens = torch.ones_like(at, dtype=torch.bool), cumulative(counts)
    log_ratio = clamped_log_ratio(old, rollout, mask)
    parts = [_over_tokens(part, band) for part in torch.split(log_ratio, _IN_CACHE)]
    metrics = merge_metrics(*(found for found, _, _ in parts))
    weights, squares = sum(part[1] for part in parts), sum(part[2] for part in parts)
    metrics["correction/ess"] = Metric.mean(weights**2 / (tokens * squares), tokens)
    for name, values in mismatch_sequences(log_ratio, old, rollout, mask, cu_seqlens).items():
        metrics[name] = Metric.mean(values.mean().item(), len(counts))
    return metrics


def _over_tokens(log_ratio: Tensor, band: tuple[float, float] | None) -> tuple[Metrics, float, float]:
    """Means and maxima over a block of tokens, the sum of its ratios, and the sum of their squares."""
    ratio = log_ratio.exp()
    means = {name: Metric.mean(x.mean().item(), len(x)) for name, x in mismatch_tokens(log_ratio, band).items()}
    largest = {name: Metric.max(x.max().item()) for name, x in mismatch_largest(log_ratio).items()}
    return means | largest, ratio.sum().item(), ratio.square().sum().item()
