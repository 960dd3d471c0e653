"""On-policy distillation: the student samples, a teacher says how likely it finds what was sampled.

As a loss (`DistillationObjective`), or as a reward (`distillation_rewards`) for any policy loss. The teacher's view
comes with the batch: `extras["teacher_logprobs"]`, [T] for the sampled tokens or [T, K] for the teacher's K most likely
ones. Source: arXiv 2306.13649.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hone.algorithms import DISTILLATION_LOSSES
from hone.algorithms.distillation_settings import SampledKlSettings
from hone.algorithms.kl import kl_penalty
from hone.algorithms.segments import spread
from hone.algorithms.settings import KlKind
from hone.types import Batch, LossOutput, ModelOutput

TEACHER = "teacher_logprobs"  # of Batch.extras
TOP_K = "top_k_logprobs"  # of ModelOutput.extras: the student's log-probs of the teacher's K tokens, [T, K]


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


def choose_teacher(logprobs: Tensor, teacher: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Each sequence's own teacher out of M: [M, T] and [N] int64 -> [T].

    Raises ValueError for a teacher that does not exist.
    """
    if len(teacher) and not 0 <= int(teacher.min()) <= int(teacher.max()) < len(logprobs):
        raise ValueError(f"a sequence names teacher {int(teacher.max())}, and there are {len(logprobs)} (from 0)")
    row = spread(teacher, cu_seqlens)
    return logprobs.gather(0, row[None])[0]


def distillation_rewards(batch: Batch, coef: float, kind: KlKind = "k1") -> Tensor:
    """Token rewards minus coef times the reverse KL estimate of each token, [T].

    Reads `old_logprobs` and `extras["teacher_logprobs"]`, and `token_rewards` if they are filled (else 0).
    """
    if batch.old_logprobs is None or TEACHER not in batch.extras:
        raise ValueError(f"distillation rewards need Batch.old_logprobs and Batch.extras[{TEACHER!r}]")
    kl = torch.where(batch.loss_mask, kl_penalty(batch.old_logprobs, batch.extras[TEACHER], kind), 0)
    return -coef * kl if batch.token_rewards is None else batch.token_rewards - coef * kl


class DistillationObjective:
    """A distillation loss by name, for the student."""

    def __init__(self, settings: SampledKlSettings | Any) -> None:
        self._loss: Callable[[Tensor, Tensor, Any], Tensor] = DISTILLATION_LOSSES.get(settings.name)
        self._settings = settings
        self._sampled = settings.name == "reverse_kl"
        self.needs: frozenset[str] = frozenset() if self._sampled else frozenset({TOP_K})

    def __call__(self, output: ModelOutput, batch: Batch) -> LossOutput:
        """Raises ValueError if the student's or the teacher's log-probs are missing."""
        lp = output.logprobs if self._sampled else output.extras.get(TOP_K)
        if lp is None or TEACHER not in batch.extras:
            wanted = "ModelOutput.logprobs" if self._sampled else f"ModelOutput.extras[{TOP_K!r}]"
            raise ValueError(f"distillation needs {wanted} and Batch.extras[{TEACHER!r}]")
        losses = torch.where(batch.loss_mask, self._loss(lp, batch.extras[TEACHER], self._settings), 0)
        return LossOutput(losses, {"train/teacher_kl": losses.detach()})
