"""Places the teachers of a run: in training engines that only infer, or in rollout engines that score."""

from __future__ import annotations

from typing import Any

from hone.config import ConfigError
from hone.platforms.base import compute_dtype, current_platform
from hone.rollout.settings import RolloutConfig
from hone.trainers.policy.generation import Generation
from hone.trainers.policy.settings import PolicyRunConfig, TeacherConfig
from hone.trainers.policy.teachers import Teacher
from hone.trainers.run.context import RunContext
from hone.trainers.run.roles import frozen_engine, place_role, require_same_vocabulary
from hone.workers.rollout import RolloutSpec
from hone.workers.teacher import EngineScorer, ServerScorer
from hone.workers.train import TrainSpec

TEACHERS = "teachers"  # folder of a run folder, for the logs of their servers


class TeacherPlacement:
    """Loads one teacher after the other."""

    def __init__(self, config: PolicyRunConfig, tokenizer: Any, context: RunContext, generation: Generation) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._context = context
        self._generation = generation
        self._temperature = config.rollout.sampling.temperature or 1.0

    def place(self, name: str, config: TeacherConfig) -> Teacher:
        """One teacher. Raises ConfigError if its vocabulary is not the policy's, or its engine cannot do the loss."""
        require_same_vocabulary(f"distillation.teachers.{name}", config.model, self._tokenizer)
        if config.served_by == "rollout":
            return self._generation.once(f"teacher {name}", lambda: self._scorer(name, config))
        engine = config.engine or frozen_engine(self._config.actor)
        spec = TrainSpec(config.model, engine, temperature=self._temperature)
        return place_role(f"teacher_{name}", spec, self._config.runtime, self._context.recorder)

    def _scorer(self, name: str, config: TeacherConfig) -> Teacher:
        """A rollout engine with the teacher's weights.

        Raises ConfigError for a loss or a temperature that the engine does not support.
        """
        key = f"distillation.teachers.{name}"
        compute = compute_dtype((config.engine or self._config.actor).compute_dtype, current_platform())
        settings = config.rollout or RolloutConfig(builtin=self._config.rollout.builtin)
        if settings.backend == "builtin":
            distillation = self._config.distillation
            if distillation is not None and not distillation.loss.sampled:
                raise ConfigError(
                    f"{key}.served_by: the built-in rollout engine scores sampled tokens; loss "
                    f"{distillation.loss.name} needs engine, or a server (rollout.backend)"
                )
            return EngineScorer(config.model, settings.builtin, compute, self._temperature)
        if self._temperature != 1:
            raise ConfigError(
                f"{key}.rollout.backend: {settings.backend} says how likely it finds tokens at temperature 1, and "
                f"rollout.sampling.temperature is {self._temperature:g}; take served_by: engine, or temperature 1"
            )
        spec = RolloutSpec(
            settings=settings,
            weights=self._config.weights,
            model=config.model,
            compute_dtype=compute,
            tokenizer=self._tokenizer,
            folder=self._context.folder / TEACHERS / name,
            runtime=self._config.runtime,
            role=f"teacher_{name}",
        )
        try:
            scorer = ServerScorer(spec, self._generation.loop.run)
        except ConfigError as error:
            raise ConfigError(f"{key}.rollout: {error}") from error
        self._generation.later(scorer.start, scorer.close)
        return scorer
