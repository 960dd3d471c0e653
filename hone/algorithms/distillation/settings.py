"""Settings of on-policy distillation. Imports no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import SerializeAsAny, field_validator, model_validator

from hone.algorithms import DISTILLATION_LOSSES
from hone.algorithms.settings import KlKind
from hone.config import Choice, Config, FromRegistry, setting


class DistillationLossSettings(Choice):
    """Base class of the distillation losses' settings."""

    sampled: ClassVar[bool] = False
    """True if the loss reads the teacher's log-probs of the sampled tokens; otherwise of its `k` likeliest tokens."""


class SampledKlSettings(DistillationLossSettings):
    """Reverse KL from the teacher's log-probs of the student's own tokens."""

    name: str = "reverse_kl"
    sampled = True
    kind: KlKind = setting("k1+", "estimator per token; with +: the same value, with k2's gradient")

    @field_validator("kind")
    @classmethod
    def _from_two_logprobs(cls, value: KlKind) -> KlKind:
        if value == "full":
            raise ValueError("full needs the whole vocabulary of the teacher; take reverse_top_k, or one of k1, k2, k3")
        return value


class TopKSettings(DistillationLossSettings):
    """Base class of losses over the teacher's most likely tokens."""

    k: int = setting(16, "how many of the teacher's most likely tokens are compared", unit="tokens", ge=1)


class ForwardTopKSettings(TopKSettings):
    """KL(teacher, student) over the teacher's most likely tokens."""

    name: str = "forward_top_k"


class ReverseTopKSettings(TopKSettings):
    """KL(student, teacher) over the teacher's most likely tokens."""

    name: str = "reverse_top_k"


class DistillationConfig(Config):
    """Use of the teachers' log-probs: in the loss, the reward or the advantage."""

    loss: Annotated[SerializeAsAny[DistillationLossSettings], FromRegistry(DISTILLATION_LOSSES)] = setting(
        factory=SampledKlSettings, meaning="divergence from the teacher"
    )
    where: Literal["in_loss", "in_advantage", "in_reward"] = setting(
        "in_loss",
        "part of the loss, or subtracted from each token's advantage or reward",
    )
    coef: float = setting(1.0, "weight of the divergence", gt=0)
    task_coef: float = setting(1.0, "weight of the task's reward; 0: learn from the teacher only", ge=0)

    @model_validator(mode="after")
    def _a_reward_is_sampled(self) -> DistillationConfig:
        if self.where != "in_loss" and not self.loss.sampled:
            raise ValueError(f"where: {self.where} takes the log-probs of sampled tokens: loss should be reverse_kl")
        return self
