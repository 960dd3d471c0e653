"""On-policy distillation: the student samples, a teacher scores the samples.

    batch with the teacher's view --before_advantages--> token rewards      (where: in_reward)
    batch with advantages --after_advantages--> advantages                  (task_coef; where: in_advantage)
    policy objective --objective--> policy objective + divergence           (where: in_loss)

The teacher's view is `TEACHER_LOGPROBS` [T] of the sampled tokens and, for the top-k losses,
`TOP_K_LOGPROBS` [T, K] of its K most likely tokens, whose ids are `Batch.ids_at` [T, K].
Source: arXiv 2306.13649; the teacher as reward: arXiv 2306.08543.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hone.algorithms import DISTILLATION_LOSSES
from hone.algorithms.distillation.settings import (
    DistillationConfig,
    DistillationLossSettings,
    SampledKlSettings,
    TopKSettings,
)
from hone.algorithms.kl import kl_penalty
from hone.algorithms.objective import present
from hone.algorithms.segments import masked_mean, on_last_loss_token
from hone.algorithms.settings import KlKind
from hone.types import Axis, Batch, Extra, LossFn, LossOutput, Metric, Metrics, ModelOutput

TEACHER_LOGPROBS = Extra("teacher_logprobs")  # of the teacher that judges the sequence, [T] float32
TOP_K_LOGPROBS = Extra("teacher_top_k_logprobs")  # the teacher's of the tokens in `Batch.ids_at`, [T, K] float32
TEACHER_INDEX = Extra("teacher_index", Axis.SEQUENCE)  # [N] int64: number of the teacher that judges the sequence

AT = "logprobs_at"  # of ModelOutput.extras: the student's log-probs of the teacher's K tokens, [T, K]


def reverse_kl(lp: Tensor, teacher: Tensor, settings: SampledKlSettings) -> Tensor:
    """Estimate of KL(student, teacher) from the sampled tokens: two [T] -> [T]."""
    return kl_penalty(lp, teacher, settings.kind)


def forward_top_k(lp: Tensor, teacher: Tensor, settings: Any) -> Tensor:
    """KL(teacher, student) over the teacher's K tokens and one bin for all others: two [T, K] -> [T]."""
    return _binned_kl(teacher, lp)


def reverse_top_k(lp: Tensor, teacher: Tensor, settings: Any) -> Tensor:
    """KL(student, teacher) over the teacher's K tokens and one bin for all others: two [T, K] -> [T]."""
    return _binned_kl(lp, teacher)


def _binned_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p, q) with the rest of the vocabulary as one bin; between 0 and the exact KL."""
    p, q = _with_rest(p), _with_rest(q)
    return (p.exp() * (p - q)).sum(-1)


def _with_rest(lp: Tensor) -> Tensor:
    total = lp.logsumexp(-1, keepdim=True).clamp(max=-1e-6)
    return torch.cat([lp, torch.log(-torch.expm1(total))], dim=-1)


def distillation_penalty(batch: Batch, kind: KlKind) -> Tensor:
    """Reverse KL estimate of each token from `old_logprobs` and the teacher's, [T]; 0 where none was sampled."""
    old = present(batch.old_logprobs, "Batch.old_logprobs")
    return torch.where(batch.sampled_mask, kl_penalty(old, TEACHER_LOGPROBS.needed(batch), kind), 0)


def distillation_rewards(batch: Batch, coef: float, kind: KlKind = "k1") -> Tensor:
    """Token rewards minus coef times the reverse KL estimate of each token, [T].

    Reads `old_logprobs`, `TEACHER_LOGPROBS`, and `token_rewards` (0 if not filled).
    """
    penalty = coef * distillation_penalty(batch, kind)
    return -penalty if batch.token_rewards is None else batch.token_rewards - penalty


class DistillationObjective:
    """Objective of the student with a distillation loss by name."""

    def __init__(self, settings: DistillationLossSettings) -> None:
        self._loss: Callable[[Tensor, Tensor, Any], Tensor] = DISTILLATION_LOSSES.get(settings.name)
        self._settings = settings
        self._sampled = settings.sampled
        self.needs: frozenset[str] = frozenset() if self._sampled else frozenset({AT})

    def __call__(self, output: ModelOutput, batch: Batch) -> LossOutput:
        """Compute the loss. Raises ValueError if the student's or the teacher's log-probs are missing."""
        if self._sampled:
            lp, teacher = present(output.logprobs, "ModelOutput.logprobs"), TEACHER_LOGPROBS.needed(batch)
        else:
            lp, teacher = present(output.extras.get(AT), f"ModelOutput.extras[{AT!r}]"), TOP_K_LOGPROBS.needed(batch)
        losses = torch.where(batch.loss_mask, self._loss(lp, teacher, self._settings), 0)
        metrics = {"train/distillation_loss": losses.detach()}
        of_sampled = TEACHER_LOGPROBS.of(batch)
        if output.logprobs is not None and of_sampled is not None:
            gap = output.logprobs.detach() - of_sampled
            metrics["train/teacher_kl"] = torch.where(batch.loss_mask, gap, 0)
        return LossOutput(losses, metrics)


class MixedObjective:
    """Policy loss plus coef times the divergence from the teacher, in one forward."""

    def __init__(self, policy: LossFn, distillation: DistillationObjective, coef: float) -> None:
        self._policy = policy
        self._distillation = distillation
        self._coef = coef
        self.needs: frozenset[str] = getattr(policy, "needs", frozenset()) | distillation.needs
        self.whole_groups: bool = getattr(policy, "whole_groups", False)

    def __call__(self, output: ModelOutput, batch: Batch) -> LossOutput:
        policy, distillation = self._policy(output, batch), self._distillation(output, batch)
        return LossOutput(
            policy.values + self._coef * distillation.values,
            {**policy.metrics, **distillation.metrics},
            policy.counted,
            policy.largest,
        )


class Distillation:
    """The steps that a trainer with teachers adds to `Algorithm`."""

    def __init__(self, config: DistillationConfig) -> None:
        self._where = config.where
        self._coef = config.coef
        self._task_coef = config.task_coef
        self._kind: KlKind = config.loss.kind if isinstance(config.loss, SampledKlSettings) else "k1"
        self._objective = DistillationObjective(config.loss) if config.where == "in_loss" else None
        self.top_k = config.loss.k if isinstance(config.loss, TopKSettings) else 0
        """Number of most likely tokens that a teacher returns; 0: only log-probs of the sampled tokens."""

    @property
    def needs_old_logprobs(self) -> bool:
        """Return whether the trainer must compute the student's log-probs before the update."""
        return self._where != "in_loss"

    @property
    def fills_token_rewards(self) -> bool:
        """Return whether the divergence is part of the token rewards."""
        return self._where == "in_reward"

    def before_advantages(self, batch: Batch) -> Batch:
        """With `in_reward`, fill the token rewards: task_coef times the task's reward minus the divergence."""
        if self._where != "in_reward":
            return batch
        if batch.rewards is None:
            raise ValueError("Batch.rewards is missing: the teacher's part is added to the task's rewards")
        task = on_last_loss_token(self._task_coef * batch.rewards, batch.sampled_mask, batch.cu_seqlens)
        batch = batch.with_(token_rewards=task)
        return batch.with_(token_rewards=distillation_rewards(batch, self._coef, self._kind))

    def after_advantages(self, batch: Batch) -> Batch:
        """Scale the advantages by task_coef and, with `in_advantage`, subtract each token's divergence."""
        if self._where == "in_reward":
            return batch
        if batch.advantages is None:
            raise ValueError("Batch.advantages is missing: call Algorithm.advantages first")
        advantages = self._task_coef * batch.advantages
        if self._where == "in_advantage":
            penalty = torch.where(batch.loss_mask, distillation_penalty(batch, self._kind), 0)
            advantages = advantages - self._coef * penalty
        return batch.with_(advantages=advantages)

    def objective(self, policy: LossFn) -> LossFn:
        """The actor's loss."""
        return policy if self._objective is None else MixedObjective(policy, self._objective, self._coef)

    def measure(self, batch: Batch) -> Metrics:
        """KL(student, teacher) from the sampled tokens (k1); empty if the objective measures it."""
        if self._objective is not None:
            return {}
        kl = masked_mean(distillation_penalty(batch, "k1"), batch.loss_mask)
        return {"train/teacher_kl": Metric.mean(kl.item(), int(batch.loss_mask.sum()))}
