"""Settings of preference and reward-model losses. No torch in here."""

from __future__ import annotations

from hone.config import Choice, setting


class PreferenceSettings(Choice):
    """Base of the preference losses' settings."""

    beta: float = setting(0.1, "strength of the pull towards the reference, or scale of the log-prob margin", gt=0)

    @property
    def paired(self) -> bool:
        """Whether the loss compares two answers to one prompt; else it judges single answers."""
        return True

    @property
    def needs_reference(self) -> bool:
        """Whether `Batch.ref_logprobs` must be filled."""
        return True

    @property
    def length_normalised(self) -> bool:
        """Whether the loss looks at log-probs per token, so that the implicit rewards are per token too."""
        return False


class DpoSettings(PreferenceSettings):
    """Direct preference optimisation."""

    name: str = "dpo"


class IpoSettings(PreferenceSettings):
    """Identity preference optimisation."""

    name: str = "ipo"

    @property
    def length_normalised(self) -> bool:
        return True


class HingeSettings(PreferenceSettings):
    """Hinge loss on the margin."""

    name: str = "hinge"


class NoisySettings(PreferenceSettings):
    """Base of the losses that expect some labels to be wrong."""

    label_smoothing: float = setting(0.1, "share of pairs whose label is expected to be wrong", ge=0, lt=0.5)


class RobustSettings(NoisySettings):
    """DPO made unbiased under label noise."""

    name: str = "robust"


class CdpoSettings(NoisySettings):
    """DPO with soft labels."""

    name: str = "cdpo"


class SimpoSettings(PreferenceSettings):
    """Length-normalised margin without reference."""

    name: str = "simpo"
    beta: float = setting(2.0, "scale of the margin of mean log-probs", gt=0)
    margin: float = setting(1.0, "margin that the chosen answer should win by", ge=0)

    @property
    def length_normalised(self) -> bool:
        return True

    @property
    def needs_reference(self) -> bool:
        return False


class OrpoSettings(PreferenceSettings):
    """Odds ratio beside the likelihood of the chosen answer, without reference."""

    name: str = "orpo"
    beta: float = setting(0.1, "weight of the odds-ratio term", gt=0)

    @property
    def length_normalised(self) -> bool:
        return True

    @property
    def needs_reference(self) -> bool:
        return False


class KtoSettings(PreferenceSettings):
    """Single answers, each labelled good or bad."""

    name: str = "kto"
    desirable: float = setting(1.0, "weight of good answers", gt=0)
    undesirable: float = setting(1.0, "weight of bad answers", gt=0)
    baseline: bool = setting(
        True, "measure the KL baseline in every step, on answers put under other prompts; false: it is 0"
    )

    @property
    def paired(self) -> bool:
        return False


class BradleyTerrySettings(Choice):
    """Reward model from comparisons."""

    name: str = "bradley_terry"
    centring: float = setting(0.0, "strength of the pull of the two scores' sum towards 0", ge=0)


class ProcessSettings(Choice):
    """Process reward model: right or wrong for each labelled token."""

    name: str = "process"
    step_separator: str = setting("\n", "stands between two steps of an answer")
