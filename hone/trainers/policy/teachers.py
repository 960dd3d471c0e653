"""Teachers: models that say how likely they find the tokens that the policy sampled.

prompts --TeacherChoice--> number of the teacher of each sequence --Teachers--> batch with teacher log-probs
run file --TeacherPlacement--> each in a training engine that only infers, or in a rollout engine that scores
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hone.algorithms.distillation.losses import TEACHER_INDEX, TEACHER_LOGPROBS, TOP_K_LOGPROBS, Distillation
from hone.config import ConfigError
from hone.data.packing import restore, select
from hone.platforms.base import compute_dtype, current_platform
from hone.registry import unknown
from hone.rollout.settings import RolloutConfig
from hone.trainers.policy.generation import Generation
from hone.trainers.policy.settings import PolicyRunConfig, TeacherConfig
from hone.trainers.run.context import RunContext
from hone.trainers.run.recorder import Recorder
from hone.trainers.run.roles import frozen_engine, place_role, require_same_vocabulary
from hone.types import Batch, Need, Prompt, TopK, TrajectoryGroup
from hone.workers.rollout import RolloutSpec
from hone.workers.scoring import BuiltinScorer, ScoringModel, ServerScorer
from hone.workers.train import TrainHandle, TrainSpec

TEACHERS = "teachers"  # folder of a run folder, for the logs of their servers


class TeacherChoice:
    """Choice of the teacher that judges the answers to a prompt, by a column of its row."""

    def __init__(self, field: str, names: Sequence[str]) -> None:
        """`field`: the column that names the teacher; empty: the first teacher judges all rows."""
        self._field = field
        self._names = list(names)

    def number_of(self, prompt: Prompt) -> int:
        """The number of the prompt's teacher. Raises ValueError naming the row and the nearest teacher."""
        if not self._field:
            return 0
        row: dict[str, Any] = {"data_source": prompt.data_source, **prompt.row}
        if self._field not in row:
            problem = unknown("distillation.teacher_field", self._field, list(row))
            raise ValueError(f"prompt {prompt.prompt_id}: {problem}")
        name = str(row[self._field])
        if name not in self._names:
            problem = unknown("teacher", name, self._names)
            raise ValueError(f"prompt {prompt.prompt_id}, field {self._field}: {problem}")
        return self._names.index(name)

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise ValueError, before anything is generated, for a prompt whose row names no teacher of this run."""
        if self._field:
            for prompt in prompts:
                self.number_of(prompt)

    def assign(self, batch: Batch, groups: Sequence[TrajectoryGroup]) -> Batch:
        """The batch that was packed from `groups`, with `TEACHER_INDEX`."""
        numbers = torch.tensor([self.number_of(group.prompt) for group in groups])
        return TEACHER_INDEX.on(batch, numbers[batch.group_index])


class Teachers:
    """Runs each teacher on its own sequences."""

    learner: TrainHandle | None = None

    def __init__(self, teachers: Sequence[ScoringModel], distillation: Distillation, recorder: Recorder) -> None:
        self._teachers = list(teachers)
        self._distillation = distillation
        self._recorder = recorder
        top_k = distillation.top_k
        self._needs: frozenset[Need] = frozenset({TopK(top_k)} if top_k else ())

    def __call__(self, batch: Batch) -> Batch:
        """The batch with `TEACHER_LOGPROBS`, what top-k losses read, and with `in_reward` the token rewards."""
        judge = TEACHER_INDEX.needed(batch)
        mine = [(judge == number).nonzero()[:, 0].tolist() for number in range(len(self._teachers))]
        busy = [number for number, rows in enumerate(mine) if rows]
        parts = [mine[number] for number in busy]
        asked = batch.with_(loss_mask=batch.sampled_mask)  # a teacher that is served knows no other mask
        views = [self._teachers[number].infer_batch(select(asked, mine[number]), self._needs) for number in busy]

        def joined(pieces: Sequence[Any]) -> torch.Tensor:
            return restore(pieces, parts, batch.cu_seqlens)

        batch = TEACHER_LOGPROBS.on(batch, joined([view.logprobs for view in views]))
        if self._needs:
            batch = batch.with_(ids_at=joined([view.extras["top_k_ids"] for view in views]))
            batch = TOP_K_LOGPROBS.on(batch, joined([view.extras["top_k_logprobs"] for view in views]))
        self._recorder.record(self._distillation.measure(batch))
        return self._distillation.before_advantages(batch)


class TeacherPlacement:
    """Loads one teacher after the other."""

    def __init__(self, config: PolicyRunConfig, tokenizer: Any, context: RunContext, generation: Generation) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._context = context
        self._generation = generation
        self._temperature = config.rollout.sampling.temperature or 1.0

    def place(self, name: str, config: TeacherConfig) -> ScoringModel:
        """One teacher. Raises ConfigError if its vocabulary is not the policy's, or its engine cannot do the loss."""
        require_same_vocabulary(f"distillation.teachers.{name}", config.model, self._tokenizer)
        if config.served_by == "rollout":
            return self._generation.once(f"teacher {name}", lambda: self._scorer(name, config))
        engine = config.engine or frozen_engine(self._config.actor)
        spec = TrainSpec(config.model, engine, temperature=self._temperature)
        return place_role(f"teacher_{name}", spec, self._config.runtime, self._context.recorder)

    def _scorer(self, name: str, config: TeacherConfig) -> ScoringModel:
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
            return BuiltinScorer(config.model, settings.builtin, compute, self._temperature)
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
