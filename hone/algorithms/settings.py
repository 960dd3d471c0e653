"""Settings of the algorithms: which estimator and loss, and their few numbers. No torch in here.

Each estimator's and each loss's settings class also says, as data, which fields of a `Batch` it reads beyond the
packed tokens (`required_fields`) and what its paper averages over (`own_aggregation`), so that a run whose parts do
not produce a field fails at start-up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import SerializeAsAny, model_validator

from hone.algorithms import ADVANTAGES, POLICY_LOSSES
from hone.algorithms.presets import PRESETS
from hone.composition import Layer
from hone.config import Choice, Config, ConfigError, FromRegistry, setting
from hone.registry import unknown

Mode = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "token_sum"]
KlKind = Literal["k1", "k2", "k3", "abs", "full", "k1+", "k2+", "k3+", "abs+"]


# ------------------------------------------------------------------------------------------------------ advantages


class AdvantageSettings(Choice):
    """Base of the estimators' settings."""

    @property
    def required_fields(self) -> frozenset[str]:
        """Fields of `Batch` that must be filled; `extras.x` and `components.x` name a key of a mapping."""
        return frozenset({"rewards"})

    @property
    def any_rewards(self) -> bool:
        """Whether rewards may be any numbers; else only 0 and 1."""
        return True


class GaeSettings(AdvantageSettings):
    """Generalised advantage estimation."""

    name: str = "gae"
    gamma: float = setting(1.0, "discount per generated token", ge=0, le=1)
    lam: float = setting(1.0, "lambda of the policy's advantages", ge=0, le=1)
    length_adaptive_alpha: float | None = setting(
        None, "if set, lambda = 1 - 1 / (alpha x generated tokens) in place of lam (VAPO: 0.05)", gt=0
    )
    critic_lam: float | None = setting(None, "lambda of the critic's returns; null: the policy's (VAPO: 1)", ge=0, le=1)

    @property
    def required_fields(self) -> frozenset[str]:
        return frozenset({"rewards", "values"})


class GrpoSettings(AdvantageSettings):
    """Reward against the group's mean."""

    name: str = "grpo"
    scale_by: Literal["group", "batch", "none"] = setting(
        "group", "standard deviation to divide by: the group's, the batch's, or none (Dr.GRPO)"
    )


class GrpoPassKSettings(AdvantageSettings):
    """Only the best of a group is reinforced."""

    name: str = "grpo_pass_k"
    scale: bool = setting(True, "divide by the group's standard deviation")


class GdpoSettings(AdvantageSettings):
    """Each reward component normalised on its own."""

    name: str = "gdpo"
    weights: dict[str, float] = setting(..., "weight of each reward component", min_length=1)

    @property
    def required_fields(self) -> frozenset[str]:
        return frozenset(f"components.{name}" for name in self.weights)


class RlooSettings(AdvantageSettings):
    """Leave-one-out baseline."""

    name: str = "rloo"


class ReinforcePpSettings(AdvantageSettings):
    """Discounted reward-to-go, whitened over the batch."""

    name: str = "reinforce_pp"
    gamma: float = setting(1.0, "discount per generated token", ge=0, le=1)


class ReinforcePpBaselineSettings(AdvantageSettings):
    """Group mean as baseline, whitened over the batch."""

    name: str = "reinforce_pp_baseline"


class RemaxSettings(AdvantageSettings):
    """The reward of one greedy answer as baseline."""

    name: str = "remax"

    @property
    def required_fields(self) -> frozenset[str]:
        return frozenset({"rewards", "components.greedy_reward"})


class OpoSettings(AdvantageSettings):
    """Length-weighted group mean as baseline."""

    name: str = "opo"


class GpgAdvantageSettings(AdvantageSettings):
    """Group mean as baseline, scaled by the share of non-zero rewards."""

    name: str = "gpg"
    f_norm: float = setting(1.0, "constant divisor", gt=0)


class MaxRlSettings(AdvantageSettings):
    """Maximum-likelihood RL for binary rewards."""

    name: str = "max_rl"

    @property
    def any_rewards(self) -> bool:
        return False


class OptimalTokenBaselineSettings(AdvantageSettings):
    """Per-position baseline that minimises the gradient's variance."""

    name: str = "optimal_token_baseline"

    @property
    def required_fields(self) -> frozenset[str]:
        return frozenset({"rewards", "old_logprobs", "extras.sum_pi_squared"})


class TirOptimalTokenBaselineSettings(OptimalTokenBaselineSettings):
    """The same, with positions counted in generated tokens only."""

    name: str = "tir_optimal_token_baseline"


# ---------------------------------------------------------------------------------------------------- policy losses


class PolicyLossSettings(Choice):
    """Base of the policy losses' settings."""

    @property
    def own_aggregation(self) -> Mode:
        """What the loss is averaged over if the run file does not say."""
        return "token_mean"

    @property
    def selection(self) -> str:
        """A "module:function" that picks tokens of the whole mini-batch for this loss; empty: none are picked."""
        return ""


class ClipSettings(PolicyLossSettings):
    """A clip range of the ratio: [1 - clip_low, 1 + clip_high]."""

    clip_low: float = setting(0.2, "how far the ratio may fall below 1", ge=0, le=1)
    clip_high: float = setting(0.2, "how far the ratio may rise above 1", ge=0)


class PpoSettings(ClipSettings):
    """Clipped ratio."""

    name: str = "ppo"
    dual_clip: float | None = setting(None, "bound of the loss at negative advantages, in units of |A|", gt=1)


class ReinforceSettings(PolicyLossSettings):
    """Plain policy gradient."""

    name: str = "reinforce"


class GspoSettings(PolicyLossSettings):
    """Clipped ratio of the whole sequence (geometric mean over its tokens)."""

    name: str = "gspo"
    clip_low: float = setting(3e-4, "how far the sequence ratio may fall below 1", ge=0, le=1)
    clip_high: float = setting(4e-4, "how far the sequence ratio may rise above 1", ge=0)

    @property
    def own_aggregation(self) -> Mode:
        return "seq_mean_token_mean"


class CispoSettings(PolicyLossSettings):
    """Policy gradient weighted with a clipped, detached ratio."""

    name: str = "cispo"
    clip_low: float = setting(1.0, "how far the weight may fall below 1 (1: no lower bound)", ge=0, le=1)
    clip_high: float = setting(4.0, "how far the weight may rise above 1", ge=0)


class SftSettings(PolicyLossSettings):
    """Negative log-likelihood."""

    name: str = "sft"


class SapoSettings(PolicyLossSettings):
    """Soft gate in place of a clip."""

    name: str = "sapo"
    tau_positive: float = setting(1.0, "steepness of the gate where the advantage is positive", gt=0)
    tau_negative: float = setting(1.05, "steepness of the gate elsewhere", gt=0)


class DppoTvSettings(PolicyLossSettings):
    """Tokens whose probability moved too far get no loss."""

    name: str = "dppo_tv"
    clip_low: float = setting(0.2, "how far a token's probability may fall", ge=0, le=1)
    clip_high: float = setting(0.2, "how far a token's probability may rise", ge=0, le=1)
    truncate: float = setting(20.0, "upper bound of the detached ratio", gt=0)


class DppoKlSettings(PolicyLossSettings):
    """Tokens whose Bernoulli KL is too large get no loss."""

    name: str = "dppo_kl"
    threshold: float = setting(0.05, "largest Bernoulli KL of a token", unit="nats", ge=0)
    truncate: float = setting(20.0, "upper bound of the detached ratio", gt=0)


class GmpoSettings(PolicyLossSettings):
    """Geometric mean of clamped ratios."""

    name: str = "gmpo"
    clip_low: float = setting(0.4, "how far the log-ratio may fall below 0", unit="nats", ge=0)
    clip_high: float = setting(0.4, "how far the log-ratio may rise above 0", unit="nats", ge=0)

    @property
    def own_aggregation(self) -> Mode:
        return "seq_mean_token_mean"


class ClipCovSettings(ClipSettings):
    """PPO without the loss of a few tokens that would cost the most entropy."""

    name: str = "clip_cov"
    share: float = setting(2e-4, "share of the mini-batch's tokens that get no loss", gt=0, le=1)
    cov_low: float = setting(1.0, "tokens with a covariance above this ...")
    cov_high: float = setting(5.0, "... and below this may be picked")

    @property
    def selection(self) -> str:
        return "hone.algorithms.selection:random_by_covariance"


class KlCovSettings(PolicyLossSettings):
    """Policy gradient with a KL penalty on the few tokens that would cost the most entropy."""

    name: str = "kl_cov"
    share: float = setting(2e-4, "share of the mini-batch's tokens that are penalised", gt=0, le=1)
    coef: float = setting(1.0, "strength of the penalty", ge=0)

    @property
    def selection(self) -> str:
        return "hone.algorithms.selection:top_by_covariance"


class DroSettings(PolicyLossSettings):
    """Policy gradient with a quadratic penalty on the log-ratio."""

    name: str = "dro"
    beta: float = setting(0.05, "strength of the penalty", ge=0)


class GpgSettings(PolicyLossSettings):
    """Plain policy gradient without importance weights."""

    name: str = "gpg"


# ------------------------------------------------------------------------------------------------- the other parts


class AggregationSettings(Config):
    """How per-token losses become one number; see `hone.algorithms.aggregation`."""

    mode: Mode | None = setting(None, "what the loss is averaged over; null: what the chosen loss's paper uses")
    norm_tokens: int | None = setting(
        None, "constant divisor of seq_mean_token_sum_norm (Dr.GRPO: the longest response)", unit="tokens", ge=1
    )

    @model_validator(mode="after")
    def _norm_belongs_to_its_mode(self) -> AggregationSettings:
        if (self.mode == "seq_mean_token_sum_norm") != (self.norm_tokens is not None):
            raise ValueError("norm_tokens is set exactly when mode is seq_mean_token_sum_norm")
        return self


class AdaptiveKlSettings(Config):
    """The coefficient of a KL penalty moves until the KL is `target` (Ziegler et al. 2019, arXiv 1909.08593)."""

    target: float = setting(meaning="KL per token that the coefficient steers to", unit="nats", gt=0)
    horizon: int = setting(meaning="how slowly the coefficient moves", unit="sequences", ge=1)


class KlSettings(Config):
    """The penalty that keeps the policy near the reference; coef 0 turns it off, and the reference model with it."""

    kind: KlKind = setting("k3", "estimator per token; with +: its value, but the gradient of k2")
    where: Literal["in_loss", "in_reward"] = setting("in_loss", "added to the loss, or subtracted from token rewards")
    coef: float = setting(0.0, "strength of the penalty (the first one, if it is adaptive)", ge=0)
    adaptive: AdaptiveKlSettings | None = setting(None, "steer the coefficient by the KL that is measured")

    @model_validator(mode="after")
    def _where_it_can_be(self) -> KlSettings:
        if self.adaptive is not None and self.where != "in_reward":
            raise ValueError("an adaptive coefficient needs where: in_reward")
        if self.kind == "full" and self.where == "in_reward":
            raise ValueError("kind full can only be used with where: in_loss")
        return self


class ValueLossSettings(Config):
    """The critic's loss."""

    clip: float | None = setting(0.2, "how far a value may move from its old one in one batch; null: freely", gt=0)


class OverlongSettings(Config):
    """DAPO's soft punishment of answers that come near the length limit."""

    buffer_tokens: int = setting(
        ..., "the punishment grows over this many tokens before the limit", unit="tokens", ge=1
    )
    factor: float = setting(1.0, "punishment at the limit", ge=0)


class SkipZeroVarianceSettings(Config):
    """Prompts whose last groups had no variance are skipped before rollout, with a chance to come back (GRESO)."""

    explore: float = setting(
        0.5, "chance to play a prompt after one group without variance; after z in a row: to the power of z", gt=0, le=1
    )
    explore_step: float = setting(
        0.01, "how far the chance moves with every batch to meet the targets; 0: it stays", ge=0, lt=1
    )
    target_easy: float = setting(
        0.083, "share of groups without variance that all succeed (metric above 0) to aim at", ge=0, le=1
    )
    target_hard: float = setting(0.167, "share of groups without variance that all fail to aim at", ge=0, le=1)


class DynamicSamplingSettings(Config):
    """Groups that cannot teach anything are replaced by others."""

    metric: str = setting("reward", "drop a group if this is the same for all: reward, or a reward component's name")
    max_draws: int = setting(10, "how often a step may draw prompts before it goes on with what it has", ge=1)
    skip_zero_variance: SkipZeroVarianceSettings | None = setting(
        None, "skip prompts that are expected to have no variance before they are played (GRESO)"
    )


class RejectionSettings(Config):
    """One rule by which tokens or whole sequences are left out of the loss."""

    statistic: Literal["k1", "k2", "k3"] = setting("k1", "what is bounded: k1 the ratio itself, k2 and k3 a divergence")
    level: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"] = setting(
        "token", "over what: each token, or the sum, mean or most extreme token of a sequence"
    )
    low: float | None = setting(None, "smallest ratio that is kept (k1 only)", gt=0)
    high: float | None = setting(None, "largest ratio (k1) or divergence (k2, k3) that is kept", gt=0)

    @model_validator(mode="after")
    def _bounded(self) -> RejectionSettings:
        if self.low is None and self.high is None:
            raise ValueError("a rejection rule needs low or high")
        if self.low is not None and self.statistic != "k1":
            raise ValueError(f"low bounds the ratio, which is statistic k1, not {self.statistic}")
        return self


class CorrectionSettings(Config):
    """What is done about a rollout policy that is not exactly the one being trained."""

    old: Literal["trainer", "rollout"] = setting(
        "trainer", "where the log-probs that ratios are taken against come from: recomputed, or the rollout engine's"
    )
    weights: Literal["token", "sequence"] | None = setting(
        None, "importance weights exp(old - rollout), and their level"
    )
    truncate: float | None = setting(None, "upper bound of the weights (truncated importance sampling)", gt=0)
    band: tuple[float, float] | None = setting(None, "weights outside [low, high] become 0 (IcePop)")
    normalize: bool = setting(False, "divide the weights by their mean over the batch")
    rejections: list[RejectionSettings] = setting(factory=list, meaning="rules that leave tokens out; all must agree")

    @model_validator(mode="after")
    def _consistent(self) -> CorrectionSettings:
        if self.old == "rollout" and (self.weights or self.rejections):
            raise ValueError(
                "with old: rollout the ratio itself is the correction; weights and rejections need trainer"
            )
        if self.weights is None and (self.truncate is not None or self.band is not None or self.normalize):
            raise ValueError("truncate, band and normalize act on weights: set weights to token or sequence")
        if self.truncate is not None and self.band is not None:
            raise ValueError("truncate and band exclude each other")
        if self.band is not None and not 0 <= self.band[0] < self.band[1]:
            raise ValueError(f"band should be [low, high] with 0 <= low < high, found {list(self.band)}")
        return self


class ResampleSettings(Config):
    """PF-PPO: trajectories are drawn again, the telling ones more often."""

    scheme: Literal["power", "best_and_worst", "mostly_best"] = setting(
        "power", "weights: |reward|^power; best and worst rewards only; 0.4 for the best and 0.1 for the rest"
    )
    power: float | None = setting(None, "exponent of scheme power; null: 1", ge=0)

    @model_validator(mode="after")
    def _power_belongs_to_its_scheme(self) -> ResampleSettings:
        if self.power is not None and self.scheme != "power":
            raise ValueError(f"power is the exponent of scheme power, and the scheme is {self.scheme}")
        return self


class AlgorithmConfig(Config):
    """What is computed from rewards and log-probs. A preset fills the keys that the run file leaves out."""

    preset: str | None = setting(None, "named algorithm that fills the keys below where they are not set")
    advantage: Annotated[SerializeAsAny[Choice], FromRegistry(ADVANTAGES)] = setting(
        factory=GrpoSettings, meaning="advantage estimator"
    )
    loss: Annotated[SerializeAsAny[Choice], FromRegistry(POLICY_LOSSES)] = setting(
        factory=PpoSettings, meaning="policy loss"
    )
    aggregation: AggregationSettings = setting(factory=AggregationSettings, meaning="from tokens to one number")
    kl: KlSettings = setting(factory=KlSettings, meaning="penalty that keeps the policy near the reference")
    entropy_coef: float = setting(0.0, "strength of the entropy bonus", ge=0)
    positive_nll_coef: float = setting(0.0, "weight of -log p on trajectories with reward above 0 (VAPO: 0.1)", ge=0)
    value_loss: ValueLossSettings = setting(factory=ValueLossSettings, meaning="the critic's loss")
    overlong: OverlongSettings | None = setting(None, "punishment of answers near the length limit")
    dynamic_sampling: DynamicSamplingSettings | None = setting(None, "replace groups without any variance")
    resample: ResampleSettings | None = setting(None, "draw trajectories again by their reward (PF-PPO)")
    correction: CorrectionSettings = setting(factory=CorrectionSettings, meaning="rollout against trained policy")

    @classmethod
    def underlay(cls, given: Mapping[str, Any]) -> Layer | None:
        """The preset's keys, below those of the run file."""
        name = given.get("preset")
        return None if name is None else Layer(f"preset {name}", _preset(name))

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: Any) -> Any:
        """The same for settings built in Python: `AlgorithmConfig(preset="dapo")`."""
        if not isinstance(data, dict) or data.get("preset") is None:
            return data
        return {**{key: _preset_value(key, value) for key, value in _preset(data["preset"]).items()}, **data}


def _preset(name: Any) -> Mapping[str, Any]:
    if name not in PRESETS:
        raise ConfigError(unknown("preset", str(name), list(PRESETS)))
    return PRESETS[name]


def _preset_value(key: str, value: Any) -> Any:
    """Presets are plain data: turn a named part into its own settings class."""
    registry = {"advantage": ADVANTAGES, "loss": POLICY_LOSSES}.get(key)
    settings = registry.settings(value["name"]) if registry else None
    return settings(**value) if settings else value
