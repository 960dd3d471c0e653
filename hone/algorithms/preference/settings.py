"""Settings of preference and reward-model losses. Imports no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import SerializeAsAny, model_validator

from hone.algorithms import PREFERENCE_LOSSES
from hone.config import Choice, Config, FromRegistry, setting


class PreferenceSettings(Choice):
    """Base class of the preference losses' settings."""

    beta: float = setting(0.1, "strength of the pull towards the reference, or scale of the log-prob margin", gt=0)

    paired: ClassVar[bool] = True
    """True if the loss compares two answers to one prompt; otherwise it judges single answers."""
    needs_reference: ClassVar[bool] = True
    """True if the loss reads `Batch.ref_logprobs`."""
    length_normalised: ClassVar[bool] = False
    """True if the loss averages log-probs over tokens, so that the implicit rewards are per token too."""


class MarginSettings(PreferenceSettings):
    """Base class of losses of a margin: how much more the policy prefers the chosen answer than the reference does."""

    f_divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = setting(
        "reverse_kl", "divergence that holds the policy near the reference (arXiv 2309.16240)"
    )
    alpha: float | None = setting(None, "order of f_divergence alpha, not 1 (which is reverse_kl)")

    @model_validator(mode="after")
    def _alpha_belongs_to_its_divergence(self) -> MarginSettings:
        if (self.f_divergence == "alpha") != (self.alpha is not None) or self.alpha == 1:
            raise ValueError("alpha is set exactly when f_divergence is alpha, and is not 1 (which is reverse_kl)")
        return self


class DpoSettings(MarginSettings):
    """Direct preference optimisation."""

    name: str = "dpo"


class IpoSettings(PreferenceSettings):
    """Identity preference optimisation."""

    name: str = "ipo"
    length_normalised = True


class HingeSettings(MarginSettings):
    """Hinge loss on the margin."""

    name: str = "hinge"


class NoisySettings(MarginSettings):
    """Base class of losses that expect some labels to be wrong."""

    label_smoothing: float = setting(0.1, "share of pairs whose label is expected to be wrong", ge=0, lt=0.5)


class RobustSettings(NoisySettings):
    """DPO made unbiased under label noise."""

    name: str = "robust"


class CdpoSettings(NoisySettings):
    """DPO with soft labels."""

    name: str = "cdpo"


class ReferenceFreeSettings(PreferenceSettings):
    """Base class of length-normalised losses without a reference."""

    length_normalised = True
    needs_reference = False


class SimpoSettings(ReferenceFreeSettings):
    """Length-normalised margin without reference."""

    name: str = "simpo"
    beta: float = setting(2.0, "scale of the margin of mean log-probs", gt=0)
    margin: float = setting(1.0, "margin by which the chosen answer should win", ge=0)


class OrpoSettings(ReferenceFreeSettings):
    """Odds ratio plus the likelihood of the chosen answer, without reference."""

    name: str = "orpo"
    beta: float = setting(0.1, "weight of the odds-ratio term", gt=0)


class KtoSettings(PreferenceSettings):
    """Single answers, each labelled good or bad."""

    name: str = "kto"
    paired = False
    desirable: float = setting(1.0, "weight of good answers", gt=0)
    undesirable: float = setting(1.0, "weight of bad answers", gt=0)
    baseline: bool = setting(
        True, "estimate the KL baseline in every step, from answers paired with other prompts; false: it is 0"
    )


class ChosenSftSettings(ReferenceFreeSettings):
    """Likelihood of the chosen answer, for a combined loss."""

    name: str = "sft"


class WeightedLoss(Config):
    """One part of a combined loss."""

    loss: Annotated[SerializeAsAny[PreferenceSettings], FromRegistry(PREFERENCE_LOSSES)] = setting(
        meaning="a loss of pairs"
    )
    weight: float = setting(1.0, "its weight in the sum", gt=0)


def _mpo() -> list[WeightedLoss]:
    """MPO's weights of the preference and generation losses (arXiv 2411.10442), without its quality loss BCO."""
    return [WeightedLoss(loss=DpoSettings(), weight=0.8), WeightedLoss(loss=ChosenSftSettings(), weight=1.0)]


class CombinedSettings(PreferenceSettings):
    """Weighted sum of pair losses (MPO)."""

    name: str = "combined"
    beta: float = setting(0.1, "scale of the implicit rewards in the metrics; each part has its own beta", gt=0)
    parts: list[WeightedLoss] = setting(factory=_mpo, meaning="the losses and their weights", min_length=1)

    @model_validator(mode="after")
    def _of_pairs(self) -> CombinedSettings:
        wrong = [one.loss.name for one in self.parts if not one.loss.paired]
        if wrong:
            raise ValueError(f"loss {wrong[0]} judges single answers; a combined loss takes losses of pairs")
        if any(
            isinstance(one.loss, ChosenSftSettings) and one.loss.beta != ChosenSftSettings().beta for one in self.parts
        ):
            raise ValueError("loss sft has no use for beta in a combined loss; set weight of its part, and remove beta")
        return self

    @property
    def needs_reference(self) -> bool:  # type: ignore[override]
        return any(one.loss.needs_reference for one in self.parts)


class RewardModelLossSettings(Choice):
    """Base class of the reward-model losses' settings."""

    paired: ClassVar[bool] = True
    """True if the loss compares two answers to one prompt; otherwise it judges the steps of single answers."""


class BradleyTerrySettings(RewardModelLossSettings):
    """Reward model trained on comparisons."""

    name: str = "bradley_terry"
    centring: float = setting(0.0, "weight of the penalty on the sum of the two scores, which keeps it near 0", ge=0)


class ProcessSettings(RewardModelLossSettings):
    """Process reward model trained on a right or wrong label per step."""

    name: str = "process"
    paired = False
    step_separator: str = setting("\n", "text between two steps of an answer")
