"""Implicit process rewards (PRIME): a language model trained only on outcomes scores each token's contribution.

    reward of a token    r_t = beta (log p_phi - log p_ref)
    its training         cross-entropy of sigmoid(sum over t of r_t) with the outcome, 0 or 1
    advantage (`prime`)  leave-one-out of the outcomes + reward-to-go of leave-one-out process rewards

Source: arXiv 2502.01456; the log-ratio as a reward: arXiv 2412.01981.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hone.algorithms.advantages import Advantages, Episodes, rloo
from hone.algorithms.objective import present
from hone.algorithms.process_reward.settings import PrimeSettings
from hone.algorithms.segments import (
    loss_token_counts,
    on_last_loss_token,
    reward_to_go,
    sequence_mean,
    sequence_sum,
    spread,
    whiten,
)
from hone.types import Axis, Batch, Extra, LossOutput, Metric, Metrics, ModelOutput

PROCESS_REWARDS = Extra("process_rewards")  # of each token, [T] float32
OUTCOMES = Extra("outcomes", Axis.SEQUENCE)  # [N] float32, between 0 and 1: what the model learns to predict


def implicit_rewards(lp: Tensor, ref: Tensor, mask: Tensor, beta: float) -> Tensor:
    """beta (lp - ref) of each sampled token, [T]; 0 outside the mask."""
    return torch.where(mask, beta * (lp - ref), 0)


def prime(batch: Batch, settings: PrimeSettings) -> Advantages:
    """rloo of the outcomes + reward-to-go of (r_t - mean r of the other answers), arXiv 2502.01456, equation 5.

    The baseline of an answer's process rewards is the mean, over the group's other answers, of each answer's mean per
    token, so that long and short answers weigh the same; it is 0 in a group of one. Raises ValueError without
    `PROCESS_REWARDS`.
    """
    mask = batch.loss_mask
    rewards = PROCESS_REWARDS.needed(batch)
    episodes = Episodes.of(batch, sequence_mean(rewards, batch.sampled_mask, batch.cu_seqlens))
    others = (episodes.group_sum(episodes.rewards) - episodes.rewards) / (episodes.size - 1).clamp(min=1)
    centred = rewards - episodes.on_tokens(others, batch, rewards.dtype)
    process = reward_to_go(centred, mask, batch.cu_seqlens, settings.gamma)
    outcome = rloo(batch, settings).advantages
    advantages = torch.where(mask, outcome + settings.process_coef * process, 0).to(outcome.dtype)
    return Advantages(whiten(advantages, mask) if settings.whiten else advantages)


class ProcessRewardObjective:
    """-o log sigmoid(R) - (1 - o) log sigmoid(-R) of each answer's summed rewards R and outcome o.

    The answer's last loss token carries the loss, so `seq_mean_token_sum` is the mean over answers. Reads
    `ref_logprobs` and `OUTCOMES`.
    """

    needs: frozenset[str] = frozenset()

    def __init__(self, beta: float) -> None:
        self._beta = beta

    def __call__(self, output: ModelOutput, batch: Batch) -> LossOutput:
        lp = present(output.logprobs, "ModelOutput.logprobs")
        ref = present(batch.ref_logprobs, "Batch.ref_logprobs")
        total = sequence_sum(implicit_rewards(lp, ref, batch.loss_mask, self._beta), batch.cu_seqlens)
        outcome = OUTCOMES.needed(batch).to(total.dtype)
        losses = -outcome * logsigmoid(total) - (1 - outcome) * logsigmoid(-total)
        shown = {"train/cross_entropy": spread(losses.detach(), batch.cu_seqlens)}
        last = on_last_loss_token(torch.ones_like(total), batch.loss_mask, batch.cu_seqlens).bool()
        return LossOutput(
            on_last_loss_token(losses, batch.loss_mask, batch.cu_seqlens), shown, dict.fromkeys(shown, last)
        )


def measure_process_rewards(batch: Batch) -> Metrics:
    """Metrics of process rewards: how well their sums separate the outcomes, and their size per token."""
    rewards, tokens = PROCESS_REWARDS.needed(batch), int(batch.sampled_mask.sum())
    outcomes = OUTCOMES.needed(batch)
    rows = loss_token_counts(batch.sampled_mask, batch.cu_seqlens) > 0
    total = sequence_sum(rewards, batch.cu_seqlens)[rows]
    right = ((total > 0) == (outcomes[rows] > 0.5)).double()
    mean = sequence_sum(rewards, batch.cu_seqlens).sum() / max(tokens, 1)
    return {
        "process_reward/accuracy": Metric.mean(right.mean().item(), len(right)),
        "process_reward/mean": Metric.mean(mean.item(), tokens),
    }
