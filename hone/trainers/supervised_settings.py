"""Run files of the supervised family: everything that `hone sft`, `prefer` and `reward-model` can be told."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import SerializeAsAny

from hone.algorithms import PREFERENCE_LOSSES, REWARD_MODEL_LOSSES
from hone.algorithms.preference_settings import BradleyTerrySettings, DpoSettings
from hone.algorithms.settings import AggregationSettings
from hone.config import Choice, Config, FromRegistry, setting
from hone.data.settings import DataConfig, DatasetConfig
from hone.engines.settings import EngineConfig
from hone.models.settings import ModelConfig
from hone.runtime.settings import RuntimeConfig
from hone.tracking.settings import TrackingConfig
from hone.trainers.settings import CheckpointConfig, RunConfig


class SupervisedConfig(Config):
    """What every supervised run has."""

    kind: str = setting(meaning="which kind of run")
    run: RunConfig = setting(meaning="which run")
    model: ModelConfig = setting(meaning="the model before training")
    data: DataConfig = setting(meaning="what is learnt from")
    samples_per_step: int = setting(meaning="samples (or pairs) in one optimizer step", unit="samples", ge=1)
    engine: EngineConfig = setting(meaning="how the model is trained", factory=EngineConfig)
    evaluation_sets: dict[str, DatasetConfig] = setting(meaning="held-out sets that are measured", factory=dict)
    evaluation_every_steps: int = setting(0, "steps between evaluations; 0: only before and after", unit="steps", ge=0)
    checkpoint: CheckpointConfig = setting(meaning="saved states", factory=CheckpointConfig)
    tracking: TrackingConfig = setting(meaning="where figures are written", factory=TrackingConfig)
    runtime: RuntimeConfig = setting(meaning="where the workers run", factory=RuntimeConfig)


class SupervisedRunConfig(SupervisedConfig):
    """A supervised fine-tuning run: `hone sft`."""

    kind: Literal["sft"] = setting("sft", "supervised fine-tuning")
    aggregation: AggregationSettings = setting(
        meaning="how token losses become one number", factory=AggregationSettings
    )


class ReferenceConfig(Config):
    """What the policy is measured against, for losses that need it."""

    logprobs: Literal["precomputed", "live"] = setting(
        "precomputed", "asked for once before step 1 and kept in the run folder, or in every step"
    )
    model: ModelConfig | None = setting(None, "another model; default: the policy before training")


class PreferenceRunConfig(SupervisedConfig):
    """A run that learns from preferences: `hone prefer`."""

    kind: Literal["prefer"] = setting("prefer", "learning from preferences")
    loss: Annotated[SerializeAsAny[Choice], FromRegistry(PREFERENCE_LOSSES)] = setting(
        factory=DpoSettings, meaning="what is done with two answers, or (kto) with one"
    )
    reference: ReferenceConfig = setting(meaning="what log-ratios are taken against", factory=ReferenceConfig)


class RewardModelRunConfig(SupervisedConfig):
    """A run that trains a reward model: `hone reward-model`."""

    kind: Literal["reward_model"] = setting("reward_model", "training a reward model")
    loss: Annotated[SerializeAsAny[Choice], FromRegistry(REWARD_MODEL_LOSSES)] = setting(
        factory=BradleyTerrySettings, meaning="comparisons of whole answers, or verdicts on each step"
    )
