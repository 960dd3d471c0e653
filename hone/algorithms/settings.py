"""Settings of the algorithms: estimator, loss, and their numbers. Imports no torch.

A settings class also states the rules of its estimator or loss as class attributes, which checks of a run read: the
fields of a `Batch` that it reads beyond the packed tokens (`required_fields`), what the loss's paper averages over
(`own_aggregation`), and so on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import SerializeAsAny, model_validator

from hone.algorithms import ADVANTAGES, POLICY_LOSSES
from hone.algorithms.filtering.settings import (
    OVERLONG,
    DynamicSamplingSettings,
    OverlongSettings,
    ResampleSettings,
)
from hone.algorithms.presets import PRESETS
from hone.composition import PRESET, Layer
from hone.config import Choice, Config, ConfigError, FromRegistry, setting
from hone.registry import unknown

Mode = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "token_sum"]
KlKind = Literal["k1", "k2", "k3", "abs", "full", "k1+", "k2+", "k3+", "abs+"]


# ------------------------------------------------------------------------------------------------------ advantages


class AdvantageSettings(Choice):
    """Base class of the estimators' settings."""

    required_fields: ClassVar[frozenset[str]] = frozenset({"rewards"})
    """Fields and extras of a batch that must be filled; `components.x` names a reward component."""
    any_rewards: ClassVar[bool] = True
    """True if rewards may be any numbers; otherwise only 0 and 1."""
    token_rewards: ClassVar[bool] = True
    """True if rewards that are put on tokens (KL, a teacher's) reach the estimator."""
    compares_group: ClassVar[bool] = True
    """True if a trajectory's advantage depends on the others of its group."""
    own_group: ClassVar[bool] = False
    """True if advantages depend on no other group of the step: then mini-batches may train before the rest is there."""
    smallest_group: ClassVar[int] = 1
    """Trajectories per prompt below which every advantage is 0."""

    @property
    def spans_groups(self) -> bool:
        """Return whether these settings make advantages depend on other groups of the step."""
        return not self.own_group

    def check_takes_token_rewards(self, what: str) -> None:
        """Raise ValueError if the estimator does not read rewards that were put on tokens."""
        if not self.any_rewards:
            raise ValueError(f"{what}: advantage {self.name} is for rewards of 0 and 1; use in_loss")
        if not self.token_rewards:
            raise ValueError(
                f"{what}: advantage {self.name} reads reward components, not rewards on tokens; use in_loss"
            )

    @property
    def ignored(self) -> frozenset[str]:
        """Keys without effect in combination with the others; setting one in a run file is an error."""
        return frozenset()


class GaeSettings(AdvantageSettings):
    """Generalised advantage estimation."""

    name: str = "gae"
    required_fields = frozenset({"rewards", "values"})
    compares_group = False
    gamma: float = setting(1.0, "discount per generated token", ge=0, le=1)
    lam: float = setting(1.0, "lambda of the policy's advantages", ge=0, le=1)
    length_adaptive_alpha: float | None = setting(
        None, "if set, lambda = 1 - 1 / (alpha x generated tokens) in place of lam (VAPO: 0.05)", gt=0
    )
    critic_lam: float | None = setting(None, "lambda of the critic's returns; null: the policy's (VAPO: 1)", ge=0, le=1)

    @property
    def ignored(self) -> frozenset[str]:
        return frozenset({"lam"} if self.length_adaptive_alpha is not None else ())


class GrpoSettings(AdvantageSettings):
    """Reward against the group's mean."""

    name: str = "grpo"
    own_group = True
    scale_by: Literal["group", "batch", "none"] = setting(
        "group", "standard deviation to divide by: the group's, the batch's, or none (Dr.GRPO)"
    )

    @property
    def spans_groups(self) -> bool:
        return not self.own_group or self.scale_by == "batch"


class GrpoPassKSettings(AdvantageSettings):
    """Only the best of a group is reinforced."""

    name: str = "grpo_pass_k"
    own_group = True
    smallest_group = 2
    scale: bool = setting(True, "divide by the group's standard deviation")


class GdpoSettings(AdvantageSettings):
    """Each reward component normalised on its own."""

    name: str = "gdpo"
    token_rewards = False
    weights: dict[str, float] = setting(..., "weight of each reward component", min_length=1)

    @property
    def required_fields(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset(f"components.{name}" for name in self.weights)


class RlooSettings(AdvantageSettings):
    """Leave-one-out baseline."""

    name: str = "rloo"
    own_group = True


class ReinforcePpSettings(AdvantageSettings):
    """Discounted reward-to-go, whitened over the batch."""

    name: str = "reinforce_pp"
    compares_group = False
    gamma: float = setting(1.0, "discount per generated token", ge=0, le=1)


class ReinforcePpBaselineSettings(AdvantageSettings):
    """Group mean as baseline, whitened over the batch."""

    name: str = "reinforce_pp_baseline"


class RemaxSettings(AdvantageSettings):
    """The reward of one greedy answer as baseline."""

    name: str = "remax"
    own_group = True
    required_fields = frozenset({"rewards", "components.greedy_reward"})
    compares_group = False


class OpoSettings(AdvantageSettings):
    """Length-weighted group mean as baseline."""

    name: str = "opo"
    own_group = True


class GpgAdvantageSettings(AdvantageSettings):
    """Group mean as baseline, scaled by the share of non-zero rewards."""

    name: str = "gpg"
    f_norm: float = setting(1.0, "constant divisor", gt=0)


class MaxRlSettings(AdvantageSettings):
    """Maximum-likelihood RL for binary rewards."""

    name: str = "max_rl"
    token_rewards = False
    own_group = True
    any_rewards = False


class OptimalTokenBaselineSettings(AdvantageSettings):
    """Per-position baseline that minimises the gradient's variance."""

    name: str = "optimal_token_baseline"
    required_fields = frozenset({"rewards", "old_logprobs", "sum_pi_squared"})


class TirOptimalTokenBaselineSettings(OptimalTokenBaselineSettings):
    """Optimal token baseline with positions counted in generated tokens only."""

    name: str = "tir_optimal_token_baseline"


class MtGrpoSettings(GrpoSettings):
    """Rewards of turns against rewards of the same turn in the group, plus the outcome against the group's mean."""

    name: str = "mt_grpo"
    own_group = False
    outcome_coef: float = setting(1.0, "strength of the outcome's advantage in the turns before the last", ge=0)


class GigpoSettings(GrpoSettings):
    """The episode against its group, plus turns against others that begin in the same state."""

    name: str = "gigpo"
    own_group = False
    gamma: float = setting(0.95, "discount per turn of the returns that are compared among equal states", ge=0, le=1)
    weight: float = setting(1.0, "strength of the comparison among equal states", ge=0)


class TurnGaeSettings(AdvantageSettings):
    """Generalised advantage estimation within turns, and between them."""

    name: str = "turn_gae"
    required_fields = frozenset({"rewards", "values"})
    compares_group = False
    gamma: float = setting(1.0, "discount per generated token within a turn", ge=0, le=1)
    lam: float = setting(1.0, "lambda within a turn", ge=0, le=1)
    turn_gamma: float = setting(1.0, "discount from one turn to the next", ge=0, le=1)
    turn_lam: float = setting(1.0, "lambda from one turn to the next", ge=0, le=1)


# ---------------------------------------------------------------------------------------------------- policy losses


class PolicyLossSettings(Choice):
    """Base class of the policy losses' settings."""

    own_aggregation: ClassVar[Mode] = "token_mean"
    """The aggregation mode if the run file sets none."""
    selection: ClassVar[str] = ""
    """The "module:function" that picks tokens of the whole mini-batch for this loss; empty: no picking."""
    zero_without_advantage: ClassVar[bool] = False
    """True if a sequence whose advantages are all 0 has a gradient of exactly 0, whatever the ratio."""
    has_ratio: ClassVar[bool] = True
    """True if the loss compares the policy with the older one that sampled a token."""
    required_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields and extras of a batch to fill in addition to the estimator's."""


class ClipSettings(PolicyLossSettings):
    """A clip range of the ratio: [1 - clip_low, 1 + clip_high]."""

    clip_low: float = setting(0.2, "how far the ratio may fall below 1", ge=0, le=1)
    clip_high: float = setting(0.2, "how far the ratio may rise above 1", ge=0)


class PpoSettings(ClipSettings):
    """Clipped ratio."""

    name: str = "ppo"
    zero_without_advantage = True
    dual_clip: float | None = setting(None, "bound of the loss at negative advantages, in units of |A|", gt=1)


class ReinforceSettings(PolicyLossSettings):
    """Plain policy gradient."""

    name: str = "reinforce"
    zero_without_advantage = True
    has_ratio = False


class GspoSettings(PolicyLossSettings):
    """Clipped ratio of the whole sequence (geometric mean over its tokens)."""

    name: str = "gspo"
    zero_without_advantage = True
    own_aggregation = "seq_mean_token_mean"
    clip_low: float = setting(3e-4, "how far the sequence ratio may fall below 1", ge=0, le=1)
    clip_high: float = setting(4e-4, "how far the sequence ratio may rise above 1", ge=0)


class CispoSettings(PolicyLossSettings):
    """Policy gradient weighted with a clipped, detached ratio."""

    name: str = "cispo"
    zero_without_advantage = True
    clip_low: float = setting(1.0, "how far the weight may fall below 1 (1: no lower bound)", ge=0, le=1)
    clip_high: float = setting(4.0, "how far the weight may rise above 1", ge=0)


class SftSettings(PolicyLossSettings):
    """Negative log-likelihood."""

    name: str = "sft"


class SapoSettings(PolicyLossSettings):
    """Soft gate instead of a clip."""

    name: str = "sapo"
    zero_without_advantage = True
    tau_positive: float = setting(1.0, "steepness of the gate where the advantage is positive", gt=0)
    tau_negative: float = setting(1.05, "steepness of the gate elsewhere", gt=0)


class DppoTvSettings(PolicyLossSettings):
    """Tokens whose probability moved too far get no loss."""

    name: str = "dppo_tv"
    zero_without_advantage = True
    clip_low: float = setting(0.2, "how far a token's probability may fall", ge=0, le=1)
    clip_high: float = setting(0.2, "how far a token's probability may rise", ge=0, le=1)
    truncate: float = setting(20.0, "upper bound of the detached ratio", gt=0)


class DppoKlSettings(PolicyLossSettings):
    """Tokens whose Bernoulli KL is too large get no loss."""

    name: str = "dppo_kl"
    zero_without_advantage = True
    threshold: float = setting(0.05, "largest Bernoulli KL of a token", unit="nats", ge=0)
    truncate: float = setting(20.0, "upper bound of the detached ratio", gt=0)


class GmpoSettings(PolicyLossSettings):
    """Geometric mean of clamped ratios."""

    name: str = "gmpo"
    zero_without_advantage = True
    own_aggregation = "seq_mean_token_mean"
    clip_low: float = setting(0.4, "how far the log-ratio may fall below 0", unit="nats", ge=0)
    clip_high: float = setting(0.4, "how far the log-ratio may rise above 0", unit="nats", ge=0)


class ClipCovSettings(ClipSettings):
    """PPO without the loss of a few tokens that would cost the most entropy."""

    name: str = "clip_cov"
    zero_without_advantage = True
    selection = "hone.algorithms.selection:random_by_covariance"
    share: float = setting(2e-4, "share of the mini-batch's tokens that get no loss", gt=0, le=1)
    cov_low: float = setting(1.0, "smallest covariance of a token that may be picked")
    cov_high: float = setting(5.0, "largest covariance of a token that may be picked")


class KlCovSettings(PolicyLossSettings):
    """Policy gradient with a KL penalty on the few tokens that would cost the most entropy."""

    name: str = "kl_cov"
    selection = "hone.algorithms.selection:top_by_covariance"
    share: float = setting(2e-4, "share of the mini-batch's tokens that are penalised", gt=0, le=1)
    coef: float = setting(1.0, "strength of the penalty", ge=0)


class DroSettings(PolicyLossSettings):
    """Policy gradient with a quadratic penalty on the log-ratio."""

    name: str = "dro"
    beta: float = setting(0.05, "strength of the penalty", ge=0)


class TopEntropySettings(PolicyLossSettings):
    """Another loss, on the tokens of the highest entropy only."""

    name: str = "top_entropy"
    selection = "hone.algorithms.selection:top_by_entropy"
    required_fields = frozenset({"old_logprobs", "entropy"})
    share: float = setting(0.2, "share of the mini-batch's tokens that get a policy loss", gt=0, le=1)
    loss: Annotated[SerializeAsAny[PolicyLossSettings], FromRegistry(POLICY_LOSSES)] = setting(
        factory=PpoSettings, meaning="the loss of these tokens"
    )

    @model_validator(mode="after")
    def _picks_once(self) -> TopEntropySettings:
        if self.loss.selection:
            raise ValueError(f"loss {self.loss.name} picks tokens itself; choose one that does not, such as ppo")
        return self

    @property
    def own_aggregation(self) -> Mode:  # type: ignore[override]
        return self.loss.own_aggregation

    @property
    def zero_without_advantage(self) -> bool:  # type: ignore[override]
        return self.loss.zero_without_advantage


class GpgSettings(PolicyLossSettings):
    """Plain policy gradient without importance weights."""

    name: str = "gpg"
    zero_without_advantage = True
    has_ratio = False


# ------------------------------------------------------------------------------------------------- the other parts


class AggregationSettings(Config):
    """The reduction of per-token losses to one number; see `hone.algorithms.aggregation`."""

    mode: Mode | None = setting(None, "what the loss is averaged over; null: as in the paper of the chosen loss")
    norm_tokens: int | None = setting(
        None, "constant divisor of seq_mean_token_sum_norm (Dr.GRPO: the longest response)", unit="tokens", ge=1
    )

    @model_validator(mode="after")
    def _norm_belongs_to_its_mode(self) -> AggregationSettings:
        if (self.mode == "seq_mean_token_sum_norm") != (self.norm_tokens is not None):
            raise ValueError("norm_tokens is set exactly when mode is seq_mean_token_sum_norm")
        return self


class AdaptiveKlSettings(Config):
    """KL coefficient that changes until the KL is `target` (Ziegler et al. 2019, arXiv 1909.08593)."""

    target: float = setting(meaning="target KL per token", unit="nats", gt=0)
    horizon: int = setting(meaning="larger values change the coefficient more slowly", unit="sequences", ge=1)


class KlSettings(Config):
    """Penalty that keeps the policy near the reference; coef 0 turns off the penalty and the reference model."""

    kind: KlKind = setting("k3", "estimator per token; with +: the same value, with k2's gradient")
    where: Literal["in_loss", "in_reward"] = setting("in_loss", "add it to the loss, or subtract it from token rewards")
    coef: float = setting(0.0, "weight of the penalty (its first value, if it is adaptive)", ge=0)
    adaptive: AdaptiveKlSettings | None = setting(None, "adapt the coefficient to the measured KL")

    @model_validator(mode="after")
    def _where_it_can_be(self) -> KlSettings:
        if self.adaptive is not None and self.where != "in_reward":
            raise ValueError("an adaptive coefficient needs where: in_reward")
        if self.kind == "full" and self.where == "in_reward":
            raise ValueError("kind full can only be used with where: in_loss")
        return self

    @property
    def ignored(self) -> frozenset[str]:
        return frozenset() if self.coef > 0 else frozenset({"kind", "where", "adaptive"})


class ValueLossSettings(Config):
    """The critic's loss."""

    clip: float | None = setting(0.2, "largest change of a value prediction within a batch; null: no limit", gt=0)


class RejectionSettings(Config):
    """Rule that removes tokens or whole sequences from the loss."""

    statistic: Literal["k1", "k2", "k3"] = setting("k1", "what is bounded: the ratio (k1), or a divergence (k2, k3)")
    level: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"] = setting(
        "token", "bound each token, or the sum, mean or most extreme token of a sequence"
    )
    low: float | None = setting(None, "smallest ratio that is kept (k1 only)", gt=0)
    high: float | None = setting(None, "largest ratio (k1) or divergence (k2, k3) that is kept", gt=0)
    advantages: Literal["all", "negative"] = setting(
        "all", "which tokens the rule may mask; negative: only those with a negative advantage"
    )
    policy: Literal["old", "current"] | None = setting(
        None, "compared with the rollout: old (once per batch) or current (in each step); null: old if it is recomputed"
    )

    @model_validator(mode="after")
    def _bounded(self) -> RejectionSettings:
        if self.low is None and self.high is None:
            raise ValueError("a rejection rule needs low or high")
        if self.low is not None and self.statistic != "k1":
            raise ValueError(f"low bounds the ratio, which is statistic k1, not {self.statistic}")
        return self


class CorrectionSettings(Config):
    """Correction of the difference between the rollout policy and the policy being trained."""

    old: Literal["trainer", "rollout"] = setting(
        "trainer",
        "source of the old log-probs in the ratio: recomputed by the trainer, or taken from the rollout engine",
    )
    weights: Literal["token", "sequence"] | None = setting(
        None, "importance weights exp(old - rollout), per token or per sequence"
    )
    truncate: float | None = setting(None, "upper bound of the weights (truncated importance sampling)", gt=0)
    band: tuple[float, float] | None = setting(None, "weights outside [low, high] become 0 (IcePop)")
    normalize: bool = setting(False, "divide the weights by their mean over the batch")
    rejections: list[RejectionSettings] = setting(factory=list, meaning="rules that mask tokens; all must keep a token")

    @model_validator(mode="after")
    def _consistent(self) -> CorrectionSettings:
        if self.old == "rollout" and self.weights:
            raise ValueError("with old: rollout the ratio itself is the correction; weights need old: trainer")
        if self.old == "rollout" and any(rule.policy == "old" for rule in self.rejections):
            raise ValueError(
                "with old: rollout a rejection compares the current policy: set policy to current, or null"
            )
        if self.weights is None and (self.truncate is not None or self.band is not None or self.normalize):
            raise ValueError("truncate, band and normalize act on weights: set weights to token or sequence")
        if self.truncate is not None and self.band is not None:
            raise ValueError("truncate and band exclude each other")
        if self.band is not None and not 0 <= self.band[0] < self.band[1]:
            raise ValueError(f"band should be [low, high] with 0 <= low < high, found {list(self.band)}")
        return self

    def rules(self, policy: Literal["old", "current"]) -> list[RejectionSettings]:
        """The rejection rules that compare this policy with the rollout."""
        usual = "current" if self.old == "rollout" else "old"
        return [rule for rule in self.rejections if (rule.policy or usual) == policy]


class AlgorithmConfig(Config):
    """Estimator, loss and their options. A preset fills the keys that the run file leaves out."""

    preset: str | None = setting(None, "named algorithm that fills in the keys below that are not set")
    advantage: Annotated[SerializeAsAny[AdvantageSettings], FromRegistry(ADVANTAGES)] = setting(
        factory=GrpoSettings, meaning="advantage estimator"
    )
    loss: Annotated[SerializeAsAny[PolicyLossSettings], FromRegistry(POLICY_LOSSES)] = setting(
        factory=PpoSettings, meaning="policy loss"
    )
    aggregation: AggregationSettings = setting(
        factory=AggregationSettings, meaning="how token losses become one number"
    )
    kl: KlSettings | None = setting(None, "penalty that keeps the policy near the reference")
    entropy_coef: float = setting(0.0, "weight of the entropy bonus", ge=0)
    positive_nll_coef: float = setting(0.0, "weight of -log p on trajectories with reward above 0 (VAPO: 0.1)", ge=0)
    value_loss: ValueLossSettings = setting(factory=ValueLossSettings, meaning="the critic's loss")
    overlong: OverlongSettings | None = setting(None, "penalty near the length limit, masking of truncated answers")
    dynamic_sampling: DynamicSamplingSettings | None = setting(None, "replace groups without any variance")
    resample: ResampleSettings | None = setting(None, "resample trajectories by their reward (PF-PPO)")
    correction: CorrectionSettings = setting(
        factory=CorrectionSettings, meaning="correction of the difference between rollout and trainer"
    )

    @property
    def penalty(self) -> KlSettings:
        """The section `kl`; without it, a penalty of weight 0."""
        return self.kl or KlSettings()

    def check_group_size(self, samples_per_prompt: int) -> None:
        """Raise ValueError if every advantage is 0 in groups of this size."""
        least = self.advantage.smallest_group
        if samples_per_prompt < least:
            raise ValueError(
                f"update.samples_per_prompt = {samples_per_prompt}: algorithm.advantage {self.advantage.name} compares "
                f"the best answer with the second, so every advantage would be 0; set it to {least} or more"
            )
        if samples_per_prompt == 1 and self.dynamic_sampling is not None:
            raise ValueError(
                "update.samples_per_prompt = 1: algorithm.dynamic_sampling drops every group without variance, and a "
                "single answer has none; set it to 2 or more, or algorithm.dynamic_sampling=null"
            )

    def check_reward_shaping(self) -> None:
        """Raise ValueError if a setting adds to a reward that the estimator does not read, or cannot take."""
        advantage = self.advantage
        if self.penalty.coef > 0 and self.penalty.where == "in_reward":
            advantage.check_takes_token_rewards("kl.where: in_reward")
        if self.overlong is None or not self.overlong.punishes:
            return
        if not advantage.any_rewards:
            raise ValueError(
                f"overlong: advantage {advantage.name} is for rewards of 0 and 1, and a penalty is neither"
            )
        if isinstance(advantage, GdpoSettings) and OVERLONG not in advantage.weights:
            raise ValueError(
                f"overlong: advantage gdpo reads only the components that it weighs; add {OVERLONG!r} to weights"
            )

    @classmethod
    def underlay(cls, given: Mapping[str, Any]) -> Layer | None:
        """The preset's keys as a layer below the run file."""
        name = given.get("preset")
        return None if name is None else Layer(f"{PRESET} {name}", _preset(name))

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: Any) -> Any:
        """Fill in the preset for settings built in Python: `AlgorithmConfig(preset="dapo")`."""
        if not isinstance(data, dict) or data.get("preset") is None:
            return data
        return {**{key: _preset_value(key, value) for key, value in _preset(data["preset"]).items()}, **data}


def _preset(name: Any) -> Mapping[str, Any]:
    if name not in PRESETS:
        raise ConfigError(unknown("preset", str(name), list(PRESETS)))
    return PRESETS[name]


def _preset_value(key: str, value: Any) -> Any:
    """Turn a named part of a preset, which is plain data, into its settings class."""
    registry = {"advantage": ADVANTAGES, "loss": POLICY_LOSSES}.get(key)
    settings = registry.settings(value["name"]) if registry else None
    return settings(**value) if settings else value
