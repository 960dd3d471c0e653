"""On-policy distillation: the student samples, a teacher says how likely it finds what was sampled.

    batch with the teacher's view --before_advantages--> token rewards      (where: in_reward)
    batch with advantages --after_advantages--> advantages                  (task_coef; where: in_advantage)
    policy objective --objective--> policy objective + divergence           (where: in_loss)

The teacher's view are `extras["teacher_logprobs"]` [T] of the sampled tokens and, for the top-k losses,
`extras["teacher_top_k_logprobs"]` [T, K] of its K most likely tokens, whose ids are `extras["ids_at"]` [T, K].
Source: arXiv 2306.13649; the teacher as reward: arXiv 2306.08543.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hone.algorithms import DISTILLATION_LOSSES
from hone.algorithms.distillation_settings import DistillationConfig, SampledKlSettings
from hone.algorithms.kl import kl_penalty
from hone.algorithms.segments import masked_mean, on_last_loss_token
from hone.algorithms.settings import KlKind
from hone.types import Batch, LossFn, LossOutput, Metric, Metrics, ModelOutput

TEACHER = "teacher_logprobs"  # of Batch.extras, as are the next two
TEACHER_TOP_K = "teacher_top_k_logprobs"
IDS = "ids_at"  # the tokens that an engine is asked about with the next
AT = "logprobs_at"  # of ModelOutput.extras: the student's log-probs of the teacher's K tokens, [T, K]


def reverse_kl(lp: Tensor, teacher: Tensor, settings: SampledKlSettings) -> Tensor:
    """Estimate of KL(student, teacher) from the sampled tokens, [T] twice -> [T]."""
    return kl_penalty(lp, teacher, settings.kind)


def forward_top_k(lp: Tensor, teacher: Tensor, settings: Any) -> Tensor:
    """KL(teacher, student) over the teacher's K tokens and one bin for all others, [T, K] twice -> [T]."""
    return _binned_kl(teacher, lp)


def reverse_top_k(lp: Tensor, teacher: Tensor, settings: Any) -> Tensor:
    """KL(student, teacher) over the teacher's K tokens and one bin for all others, [T, K] twice -> [T]."""
    return _binned_kl(lp, teacher)


def _binned_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p, q) with the rest of the vocabulary as one bin: never negative, and never above the exact KL."""
    p, q = _with_rest(p), _with_rest(q)
    return (p.exp() * (p - q)).sum(-1)


def _with_rest(lp: Tensor) -> Tensor:
    total = lp.logsumexp(-1, keepdim=True).clamp(max=-1e-6)
    return torch.cat([lp, torch.log(-torch.expm1(total))], dim=-1)


def distillation_penalty(batch: Batch, kind: KlKind) -> Tensor:
    """The reverse KL estimate of each token from `old_logprobs` and the teacher's, [T]; 0 outside the mask."""
    if batch.old_logprobs is None or TEACHER not in batch.extras:
        raise ValueError(f"the teacher's penalty needs Batch.old_logprobs and Batch.extras[{TEACHER!r}]")
    return torch.where(batch.loss_mask, kl_penalty(batch.old_logprobs, batch.extras[TEACHER], kind), 0)


def distillation_rewards(batch: Batch, coef: float, kind: KlKind = "k1") -> Tensor:
    """Token rewards minus coef times the reverse KL estimate of each token, [T].

    Reads `old_logprobs` and `extras["teacher_logprobs"]`, and `token_rewards` if they are filled (else 0).
    """
    penalty = coef * distillation_penalty(batch, kind)
    return -penalty if batch.token_rewards is None else batch.token_rewards - penalty


class DistillationObjective:
    """A distillation loss by name, for the student."""

    def __init__(self, settings: SampledKlSettings | Any) -> None:
        self._loss: Callable[[Tensor, Tensor, Any], Tensor] = DISTILLATION_LOSSES.get(settings.name)
        self._settings = settings
        self._sampled = settings.name == "reverse_kl"
        self._teacher = TEACHER if self._sampled else TEACHER_TOP_K
        self.needs: frozenset[str] = frozenset() if self._sampled else frozenset({AT})

    def __call__(self, output: ModelOutput, batch: Batch) -> LossOutput:
        """Raises ValueError if the student's or the teacher's log-probs are missing."""
        lp = output.logprobs if self._sampled else output.extras.get(AT)
        if lp is None or self._teacher not in batch.extras:
            wanted = "ModelOutput.logprobs" if self._sampled else f"ModelOutput.extras[{AT!r}]"
            raise ValueError(f"distillation needs {wanted} and Batch.extras[{self._teacher!r}]")
        losses = torch.where(batch.loss_mask, self._loss(lp, batch.extras[self._teacher], self._settings), 0)
        metrics = {"train/distillation_loss": losses.detach()}
        if output.logprobs is not None and TEACHER in batch.extras:
            gap = output.logprobs.detach() - batch.extras[TEACHER]
            metrics["train/teacher_kl"] = torch.where(batch.loss_mask, gap, 0)
        return LossOutput(losses, metrics)


class MixedObjective:
    """The policy's own loss plus coef times the divergence from the teacher, in one forward."""

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
        )


class Distillation:
    """What a trainer with teachers does around `Algorithm`, as a run file describes it."""

    def __init__(self, config: DistillationConfig) -> None:
        self._where = config.where
        self._coef = config.coef
        self._task_coef = config.task_coef
        self._kind: KlKind = config.loss.kind if isinstance(config.loss, SampledKlSettings) else "k1"
        self._objective = DistillationObjective(config.loss) if config.where == "in_loss" else None
        self.top_k: int = 0 if isinstance(config.loss, SampledKlSettings) else getattr(config.loss, "k", 0)
        """How many of its most likely tokens a teacher is asked for; 0: only about the sampled ones."""

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the student's log-probs are needed before the update."""
        return self._where != "in_loss"

    def before_advantages(self, batch: Batch) -> Batch:
        """With `in_reward`, the batch with token rewards: task_coef times the task's, minus the divergence."""
        if self._where != "in_reward":
            return batch
        if batch.rewards is None:
            raise ValueError("Batch.rewards is missing: the teacher's part is added to the task's rewards")
        task = on_last_loss_token(self._task_coef * batch.rewards, batch.loss_mask, batch.cu_seqlens)
        batch = batch.with_(token_rewards=task)
        return batch.with_(token_rewards=distillation_rewards(batch, self._coef, self._kind))

    def after_advantages(self, batch: Batch) -> Batch:
        """The batch with advantages scaled by task_coef and, with `in_advantage`, less the divergence of each token."""
        if self._where == "in_reward":
            return batch
        if batch.advantages is None:
            raise ValueError("Batch.advantages is missing: call Algorithm.advantages first")
        advantages = self._task_coef * batch.advantages
        if self._where == "in_advantage":
            advantages = advantages - self._coef * distillation_penalty(batch, self._kind)
        return batch.with_(advantages=advantages)

    def objective(self, policy: LossFn) -> LossFn:
        """The actor's loss."""
        return policy if self._objective is None else MixedObjective(policy, self._objective, self._coef)

    def measure(self, batch: Batch) -> Metrics:
        """KL(student, teacher) from the sampled tokens (k1), where the objective does not measure it."""
        if self._objective is not None:
            return {}
        kl = masked_mean(distillation_penalty(batch, "k1"), batch.loss_mask)
        return {"train/teacher_kl": Metric.mean(kl.item(), int(batch.loss_mask.sum()))}
