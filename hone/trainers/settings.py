"""Run files: everything that `hone train` and `hone sft` can be told, each section owned by the part it configures."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from hone.algorithms.settings import AggregationSettings, AlgorithmConfig
from hone.config import Config, setting
from hone.data.settings import DataConfig, DatasetConfig
from hone.engines.settings import EngineConfig
from hone.envs.settings import EpisodeConfig
from hone.models.settings import ModelConfig
from hone.rewards.settings import RewardConfig
from hone.rollout.settings import RolloutConfig
from hone.runtime.settings import RuntimeConfig
from hone.tracking.settings import TrackingConfig


class RunConfig(Config):
    """Which run this is. The same folder continues the same run."""

    dir: str = setting(meaning="the run folder: everything a run writes is in it; an existing run in it is continued")
    steps: int = setting(meaning="training steps of the whole run, resumed parts included", unit="steps", ge=1)
    seed: int = setting(0, "of data order, sampling and fresh weights; the same seed gives the same run", ge=0)


class CheckpointConfig(Config):
    """When the run's state is saved, and how much of the past is kept."""

    every_steps: int = setting(50, "steps between checkpoints; the last step always has one", unit="steps", ge=1)
    keep: int = setting(2, "newest checkpoints that are kept", unit="checkpoints", ge=1)
    keep_best: bool = setting(True, "also keep the checkpoint with the best evaluation score")


class EvaluationConfig(Config):
    """Held-out sets that are answered before training, every so often, and after it."""

    sets: dict[str, DatasetConfig] = setting(meaning="held-out data sets by name", factory=dict)
    every_steps: int = setting(0, "steps between evaluations; 0: only before and after training", unit="steps", ge=0)
    samples: int = setting(1, "answers to each prompt: n of mean@n, best@n, maj@n", unit="answers", ge=1)
    temperature: float = setting(0.0, "of evaluation answers; 0: greedy", ge=0)
    score: str = setting("", "the eval metric that `best` compares, such as eval/test/exact_match; default: the first")
    vote_pattern: str = setting("", "regular expression whose last match in an answer is its vote; default: all of it")


class UpdateConfig(Config):
    """How one step's trajectories are turned into optimizer steps."""

    prompts_per_step: int = setting(meaning="prompts whose groups one step trains on", unit="prompts", ge=1)
    samples_per_prompt: int = setting(8, "trajectories per prompt: the group's size", unit="trajectories", ge=1)
    minibatches: int = setting(1, "optimizer steps in one pass over the step's trajectories", ge=1)
    epochs: int = setting(1, "passes over the step's trajectories", ge=1)


class WarmStartConfig(Config):
    """Supervised steps before reinforcement learning, on the same model."""

    data: DataConfig = setting(meaning="worked solutions")
    steps: int = setting(meaning="supervised steps", unit="steps", ge=1)
    samples_per_step: int = setting(meaning="worked solutions in one step", unit="samples", ge=1)
    engine: EngineConfig = setting(meaning="how the supervised steps are taken", factory=EngineConfig)


class CriticConfig(Config):
    """The value model of PPO: the actor's architecture with a scalar head."""

    model: ModelConfig | None = setting(None, "its weights; default: the actor's, with a fresh head")
    engine: EngineConfig = setting(meaning="how it is trained", factory=EngineConfig)
    warmup_steps: int = setting(0, "first steps that train the critic alone", unit="steps", ge=0)


class PolicyRunConfig(Config):
    """A reinforcement-learning run: `hone train`."""

    kind: Literal["rl"] = setting("rl", "reinforcement learning")
    run: RunConfig = setting(meaning="which run")
    model: ModelConfig = setting(meaning="the policy before training")
    data: DataConfig = setting(meaning="prompts to train on")
    reward: RewardConfig = setting(meaning="what a trajectory is worth")
    update: UpdateConfig = setting(meaning="the shape of a step")
    algorithm: AlgorithmConfig = setting(meaning="advantages and loss", factory=AlgorithmConfig)
    episode: EpisodeConfig = setting(meaning="how a prompt is played out", factory=EpisodeConfig)
    rollout: RolloutConfig = setting(meaning="the engine that generates, and how it samples", factory=RolloutConfig)
    actor: EngineConfig = setting(meaning="how the policy is trained", factory=EngineConfig)
    critic: CriticConfig | None = setting(None, "the value model, for estimators that need one (gae)")
    reference: ModelConfig | None = setting(None, "what KL is measured against; default: the policy before training")
    warm_start: WarmStartConfig | None = setting(None, "supervised steps first")
    evaluation: EvaluationConfig = setting(meaning="held-out measurements", factory=EvaluationConfig)
    checkpoint: CheckpointConfig = setting(meaning="saved states", factory=CheckpointConfig)
    tracking: TrackingConfig = setting(meaning="where figures and trajectories are written", factory=TrackingConfig)
    runtime: RuntimeConfig = setting(meaning="where the workers run", factory=RuntimeConfig)

    @model_validator(mode="after")
    def _shapes_fit(self) -> PolicyRunConfig:
        if self.update.minibatches > self.update.prompts_per_step:
            raise ValueError(
                f"update.minibatches = {self.update.minibatches} is more than update.prompts_per_step = "
                f"{self.update.prompts_per_step}: a mini-batch holds at least one whole group"
            )
        return self


class SupervisedRunConfig(Config):
    """A supervised fine-tuning run: `hone sft`."""

    kind: Literal["sft"] = setting("sft", "supervised fine-tuning")
    run: RunConfig = setting(meaning="which run")
    model: ModelConfig = setting(meaning="the model before training")
    data: DataConfig = setting(meaning="samples to train on")
    samples_per_step: int = setting(meaning="samples in one optimizer step", unit="samples", ge=1)
    aggregation: AggregationSettings = setting(
        meaning="how token losses become one number", factory=AggregationSettings
    )
    engine: EngineConfig = setting(meaning="how the model is trained", factory=EngineConfig)
    evaluation_sets: dict[str, DatasetConfig] = setting(meaning="held-out sets whose loss is measured", factory=dict)
    evaluation_every_steps: int = setting(0, "steps between evaluations; 0: only before and after", unit="steps", ge=0)
    checkpoint: CheckpointConfig = setting(meaning="saved states", factory=CheckpointConfig)
    tracking: TrackingConfig = setting(meaning="where figures are written", factory=TrackingConfig)
    runtime: RuntimeConfig = setting(meaning="where the workers run", factory=RuntimeConfig)
