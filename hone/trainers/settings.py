"""Run files of `hone train`, and the sections that every kind of run has; each is owned by the part it configures."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from hone.algorithms.distillation_settings import DistillationConfig
from hone.algorithms.settings import AlgorithmConfig
from hone.config import Config, setting
from hone.data.settings import DataConfig, DatasetConfig
from hone.engines.settings import EngineConfig
from hone.envs.settings import EpisodeConfig
from hone.models.settings import ModelConfig
from hone.rewards.settings import RewardConfig
from hone.rollout.settings import RolloutConfig
from hone.runtime.settings import RuntimeConfig
from hone.tracking.settings import TrackingConfig
from hone.weights.settings import WeightSyncConfig


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


class TeacherConfig(Config):
    """A model that judges the policy's tokens; it is never trained."""

    model: ModelConfig = setting(meaning="its weights; its tokens have to be the policy's")
    engine: EngineConfig | None = setting(None, "how it is computed; default: as the actor")
    served_by: Literal["engine", "rollout"] = setting(
        "engine", "a training engine that only infers, or a rollout engine"
    )
    rollout: RolloutConfig | None = setting(
        None, "the engine of served_by: rollout; default: the built-in one as the run has it"
    )


class TeachersConfig(DistillationConfig):
    """On-policy distillation: teachers judge what the policy samples, beside the task's own reward."""

    teachers: dict[str, TeacherConfig] = setting(meaning="the teachers by name", min_length=1)
    teacher_field: str = setting(
        "", "column of the data that names each row's teacher (also data_source); needed if there are several"
    )

    @model_validator(mode="after")
    def _every_row_has_one(self) -> TeachersConfig:
        if len(self.teachers) > 1 and not self.teacher_field:
            raise ValueError(f"teacher_field should name the column that chooses among {', '.join(self.teachers)}")
        return self


class TeachersFirstConfig(TeachersConfig):
    """The same, where the task's own reward counts only if asked for."""

    task_coef: float = setting(0.0, "strength of the task's own reward; 0: the teacher alone", ge=0)


class ProcessRewardConfig(Config):
    """A language model that learns from outcomes beside the policy and rewards each token (PRIME)."""

    model: ModelConfig | None = setting(None, "its weights; default: the policy before training")
    engine: EngineConfig = setting(meaning="how it is trained", factory=EngineConfig)
    beta: float = setting(0.05, "a token's reward is beta (log p - log p of the reference)", gt=0)
    outcome: str = setting("reward", "what it predicts, between 0 and 1: reward, or a reward component's name")
    update: Literal["before", "after"] = setting(
        "before", "whether it learns from a batch before it judges it, or after"
    )


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
    weights: WeightSyncConfig = setting(meaning="how weights reach the rollout", factory=WeightSyncConfig)
    actor: EngineConfig = setting(meaning="how the policy is trained", factory=EngineConfig)
    critic: CriticConfig | None = setting(None, "the value model, for estimators that need one (gae)")
    reference: ModelConfig | None = setting(None, "what KL is measured against; default: the policy before training")
    distillation: TeachersConfig | None = setting(None, "teachers beside the task's reward")
    process_reward: ProcessRewardConfig | None = setting(None, "the process reward model, for the estimator prime")
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


class DistillRunConfig(PolicyRunConfig):
    """On-policy distillation: `hone distill`. The same run, in which the teachers come first."""

    kind: Literal["distill"] = setting("distill", "on-policy distillation")  # type: ignore[assignment]
    distillation: TeachersFirstConfig = setting(meaning="the teachers, and how their view is used")
