"""Run files of `hone train` and `hone distill`. Each section belongs to the part that it configures."""

from __future__ import annotations

from typing import Literal

import regex
from pydantic import model_validator

from hone.algorithms.distillation.settings import DistillationConfig
from hone.algorithms.settings import AlgorithmConfig
from hone.config import Config, setting
from hone.data.settings import DataConfig, PromptSetConfig
from hone.engines.settings import EngineConfig
from hone.envs.settings import EpisodeConfig
from hone.models.settings import ModelConfig
from hone.rewards.settings import RewardConfig
from hone.rollout.settings import RolloutConfig
from hone.runtime.settings import RuntimeConfig
from hone.schedule.settings import AsynchronyConfig
from hone.tracking.settings import TrackingConfig
from hone.trainers.run.settings import (
    CheckpointConfig,
    EvaluationConfig,
    ProfileConfig,
    ReferenceConfig,
    RunConfig,
    RunSettings,
)
from hone.weights.settings import WeightSyncConfig


class EvaluationSamplingConfig(Config):
    """Sampling of evaluation answers. Stop strings come from `rollout.sampling`."""

    temperature: float = setting(0.0, "divides the logits; 0 takes the likeliest token (greedy)", ge=0)
    top_k: int = setting(0, "sample among the k likeliest tokens; 0: all", unit="tokens", ge=0)
    top_p: float = setting(1.0, "sample among the likeliest tokens that together have this probability", gt=0, le=1)
    min_p: float = setting(0.0, "sample among tokens with this fraction of the likeliest one's probability", ge=0, le=1)
    max_response_tokens: int | None = setting(
        None, "longest completion; default: rollout.sampling.max_response_tokens", unit="tokens", ge=1
    )

    @model_validator(mode="after")
    def _greedy_has_no_filter(self) -> EvaluationSamplingConfig:
        if self.temperature == 0 and (self.top_k, self.top_p, self.min_p) != (0, 1.0, 0.0):
            raise ValueError(
                "temperature is 0 (greedy), so top_k, top_p and min_p have no effect; set temperature above 0, or "
                "remove them"
            )
        return self


class PolicyEvaluationConfig(EvaluationConfig):
    """Held-out sets, and how the policy answers them."""

    sets: dict[str, PromptSetConfig] = setting(  # type: ignore[assignment]
        meaning="held-out prompts by name", factory=dict
    )
    samples: int = setting(
        1, "answers to each prompt: n of mean@n, best@n, maj@n; pass@k for k below n", unit="answers", ge=1
    )
    sampling: EvaluationSamplingConfig | None = setting(None, "how answers are sampled; default: greedy")
    score: str = setting("", "the eval metric that `best` compares, such as eval/test/exact_match; default: the first")
    vote_pattern: str = setting("", "regular expression whose last match in an answer is its vote; default: all of it")

    @model_validator(mode="after")
    def _pattern_is_one(self) -> PolicyEvaluationConfig:
        try:
            regex.compile(self.vote_pattern)
        except regex.error as error:
            raise ValueError(f"vote_pattern: {self.vote_pattern!r} is no regular expression: {error}") from error
        return self

    @model_validator(mode="after")
    def _score_has_a_set(self) -> PolicyEvaluationConfig:
        if self.score and not self.sets:
            if "sets" not in self.model_fields_set:
                raise ValueError(f"score: {self.score} is measured on a held-out set; add a set to sets")
            self.__dict__["score"] = ""  # `evaluation.sets={}` switches evaluation off, with all that says how it goes
        return self

    @model_validator(mode="after")
    def _answers_differ(self) -> PolicyEvaluationConfig:
        if not self.sets:  # then nothing reads these keys, and the run says so
            return self
        if self.samples > 1 and (self.sampling is None or self.sampling.temperature == 0):
            raise ValueError(
                f"samples = {self.samples} with greedy sampling: all answers to a prompt would be the same; set "
                "sampling.temperature above 0, or samples=1"
            )
        if self.vote_pattern and self.samples == 1:
            raise ValueError("vote_pattern: a single answer has no vote; set samples above 1, or remove vote_pattern")
        return self


class UpdateConfig(Config):
    """Division of one step's trajectories into optimizer steps."""

    prompts_per_step: int = setting(meaning="prompts whose groups one step trains on", unit="prompts", ge=1)
    samples_per_prompt: int = setting(8, "trajectories per prompt: the group's size", unit="trajectories", ge=1)
    minibatches: int = setting(1, "optimizer steps in one pass over the step's trajectories", ge=1)
    epochs: int = setting(1, "passes over the step's trajectories", ge=1)


class WarmStartConfig(Config):
    """Supervised steps before reinforcement learning, on the same model."""

    data: DataConfig = setting(meaning="worked solutions")
    steps: int = setting(meaning="supervised steps", unit="steps", ge=1)
    samples_per_step: int = setting(meaning="worked solutions in one step", unit="samples", ge=1)
    actor: EngineConfig = setting(meaning="how the model is trained in these steps", factory=EngineConfig)


class CriticConfig(Config):
    """The value model of PPO: the actor's architecture with a scalar head."""

    model: ModelConfig | None = setting(None, "its weights; default: the actor's, with a fresh head")
    engine: EngineConfig = setting(meaning="how it is trained", factory=EngineConfig)
    warmup_steps: int = setting(0, "first steps that train the critic alone", unit="steps", ge=0)


class TeacherConfig(Config):
    """A model that scores the policy's tokens. It is never trained."""

    model: ModelConfig = setting(meaning="its weights; it must have the policy's vocabulary")
    engine: EngineConfig | None = setting(None, "the engine that computes it; default: the actor's settings")
    served_by: Literal["engine", "rollout"] = setting(
        "engine", "a training engine that only infers, or a rollout engine"
    )
    rollout: RolloutConfig | None = setting(
        None, "settings of the rollout engine if served_by is rollout; default: the run's built-in engine"
    )


class TeachersConfig(DistillationConfig):
    """On-policy distillation: teachers score what the policy samples, in addition to the task's reward."""

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
    """Teachers of `hone distill`: the task's reward has weight 0 by default."""

    task_coef: float = setting(0.0, "weight of the task's reward; 0: learn from the teacher only", ge=0)


class ProcessRewardConfig(Config):
    """A language model that learns from outcomes while the policy trains, and rewards each token (PRIME)."""

    model: ModelConfig | None = setting(None, "its weights; default: the policy before training")
    engine: EngineConfig = setting(meaning="how it is trained", factory=EngineConfig)
    beta: float = setting(0.05, "a token's reward is beta (log p - log p of the reference)", gt=0)
    outcome: str = setting("reward", "what it predicts, between 0 and 1: reward, or a reward component's name")
    update: Literal["before", "after"] = setting(
        "before", "whether it learns from a batch before or after it rewards the batch"
    )


class PolicyRunConfig(RunSettings):
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
    critic: CriticConfig | None = setting(None, "the value model, for estimators that need one (gae, turn_gae)")
    reference: ReferenceConfig | None = setting(
        None, "what KL is measured against; default: the policy before training"
    )
    distillation: TeachersConfig | None = setting(None, "teachers, in addition to the task's reward")
    process_reward: ProcessRewardConfig | None = setting(None, "the process reward model, for the estimator prime")
    warm_start: WarmStartConfig | None = setting(None, "supervised steps first")
    asynchrony: AsynchronyConfig | None = setting(
        None, "generation that goes on while the trainer trains; default: the two take turns"
    )
    evaluation: PolicyEvaluationConfig = setting(meaning="held-out measurements", factory=PolicyEvaluationConfig)
    checkpoint: CheckpointConfig = setting(meaning="saved states", factory=CheckpointConfig)
    profile: ProfileConfig | None = setting(None, "traces of single steps, for Perfetto; null: none")
    tracking: TrackingConfig = setting(meaning="where figures and trajectories are written", factory=TrackingConfig)
    runtime: RuntimeConfig = setting(meaning="where the workers run", factory=RuntimeConfig)

    @model_validator(mode="after")
    def _shapes_fit(self) -> PolicyRunConfig:
        if self.update.minibatches > self.update.prompts_per_step:
            raise ValueError(
                f"update.minibatches = {self.update.minibatches} is more than update.prompts_per_step = "
                f"{self.update.prompts_per_step}: a mini-batch holds at least one whole group"
            )
        if self.profile is not None:
            self.profile.of(self.run.steps)
            self.profile.ranks_of(self.runtime.most_ranks())
        self.algorithm.check_group_size(self.update.samples_per_prompt)
        if is_asynchronous(self):
            self._check_asynchrony()
        return self

    def _check_asynchrony(self) -> None:
        """Tokens from older weights get the ratio that they ask for, and dropped groups are replaced in one way."""
        assert self.asynchrony is not None
        key, correction = f"asynchrony.staleness = {self.asynchrony.staleness}", self.algorithm.correction
        weights = "algorithm.correction.weights=token algorithm.correction.truncate=2 (truncated importance sampling)"
        if not self.algorithm.loss.has_ratio and correction.weights is None:
            raise ValueError(
                f"{key} with algorithm.loss: {self.algorithm.loss.name}: this loss has no ratio to the weights that "
                f"sampled a token, so older tokens would count as new ones; set {weights}"
            )
        steps = self.update.minibatches * self.update.epochs
        if correction.old == "trainer" and correction.weights is None and steps == 1:
            raise ValueError(
                f"{key} with algorithm.correction.old: trainer and one optimizer step per batch: every ratio would be "
                "1, although the tokens come from older weights; set algorithm.correction.old=rollout (clip against "
                f"the weights that sampled), or {weights}"
            )
        sampling = self.algorithm.dynamic_sampling
        if sampling is not None and sampling.oversample > 1:
            raise ValueError(
                f"{key} with algorithm.dynamic_sampling.oversample = {sampling.oversample:g}: dropped groups are "
                "replaced by prompts that were drawn ahead; set algorithm.dynamic_sampling.oversample=1"
            )


def learns_from_teachers(config: PolicyRunConfig) -> bool:
    """Return whether teachers are the only signal, so that answers need no reward."""
    return config.distillation is not None and config.distillation.task_coef == 0


def is_asynchronous(config: PolicyRunConfig) -> bool:
    """Return whether answers are generated while the policy is trained."""
    return config.asynchrony is not None and config.asynchrony.staleness > 0


class DistillRunConfig(PolicyRunConfig):
    """On-policy distillation: `hone distill`. A policy run whose teachers are its main signal."""

    kind: Literal["distill"] = setting("distill", "on-policy distillation")  # type: ignore[assignment]
    distillation: TeachersFirstConfig = setting(meaning="the teachers, and how their log-probs are used")
    reward: RewardConfig = setting(
        meaning="what a trajectory is worth, beyond the teachers", factory=lambda: RewardConfig(components={})
    )
