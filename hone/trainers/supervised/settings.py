"""Run files of `hone sft`, `hone prefer` and `hone reward-model`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import SerializeAsAny

from hone.algorithms import PREFERENCE_LOSSES, REWARD_MODEL_LOSSES
from hone.algorithms.preference.settings import (
    BradleyTerrySettings,
    DpoSettings,
    PreferenceSettings,
    RewardModelLossSettings,
)
from hone.algorithms.settings import AggregationSettings
from hone.config import FromRegistry, setting
from hone.data.settings import DataConfig
from hone.engines.settings import EngineConfig
from hone.models.settings import ModelConfig
from hone.runtime.settings import RuntimeConfig
from hone.tracking.settings import TrackingConfig
from hone.trainers.run.settings import (
    CheckpointConfig,
    EvaluationConfig,
    ProfileConfig,
    ReferenceConfig,
    RunConfig,
    RunSettings,
)


class SupervisedConfig(RunSettings):
    """Settings of every supervised run."""

    kind: str = setting(meaning="which kind of run")
    run: RunConfig = setting(meaning="which run")
    model: ModelConfig = setting(meaning="the model before training")
    data: DataConfig = setting(meaning="the training data")
    samples_per_step: int = setting(meaning="samples (or pairs) in one optimizer step", unit="samples", ge=1)
    actor: EngineConfig = setting(meaning="how the model is trained", factory=EngineConfig)
    evaluation: EvaluationConfig = setting(meaning="held-out measurements", factory=EvaluationConfig)
    checkpoint: CheckpointConfig = setting(meaning="saved states", factory=CheckpointConfig)
    profile: ProfileConfig | None = setting(None, "traces of single steps, for Perfetto; null: none")
    tracking: TrackingConfig = setting(meaning="where figures are written", factory=TrackingConfig)
    runtime: RuntimeConfig = setting(meaning="where the workers run", factory=RuntimeConfig)


class SupervisedRunConfig(SupervisedConfig):
    """A supervised fine-tuning run: `hone sft`."""

    kind: Literal["sft"] = setting("sft", "supervised fine-tuning")
    aggregation: AggregationSettings = setting(
        meaning="how token losses become one number", factory=AggregationSettings
    )


class PreferenceReferenceConfig(ReferenceConfig):
    """The model that the policy is compared with, and when it is run."""

    logprobs: Literal["precomputed", "live"] = setting(
        "precomputed", "computed once before step 1 and kept in the run folder, or in every step"
    )


class PreferenceRunConfig(SupervisedConfig):
    """A run that learns from preferences: `hone prefer`."""

    kind: Literal["prefer"] = setting("prefer", "learning from preferences")
    loss: Annotated[SerializeAsAny[PreferenceSettings], FromRegistry(PREFERENCE_LOSSES)] = setting(
        factory=DpoSettings, meaning="loss of a pair of answers, or (kto) of one answer"
    )
    reference: PreferenceReferenceConfig = setting(
        meaning="what log-ratios are taken against", factory=PreferenceReferenceConfig
    )


class RewardModelRunConfig(SupervisedConfig):
    """A run that trains a reward model: `hone reward-model`."""

    kind: Literal["reward_model"] = setting("reward_model", "training a reward model")
    loss: Annotated[SerializeAsAny[RewardModelLossSettings], FromRegistry(REWARD_MODEL_LOSSES)] = setting(
        factory=BradleyTerrySettings, meaning="comparisons of whole answers, or verdicts on each step"
    )
