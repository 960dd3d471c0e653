"""Teachers: models that say how likely they find the tokens that the policy sampled.

prompts --TeacherChoice--> number of the teacher of each sequence --Teachers--> batch with teacher log-probs
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from hone.algorithms.distillation.losses import TEACHER_INDEX, TEACHER_LOGPROBS, TOP_K_LOGPROBS, Distillation
from hone.data.packing import restore, select
from hone.registry import unknown
from hone.trainers.run.recorder import Recorder
from hone.types import Batch, ModelOutput, Need, Prompt, TopK, TrajectoryGroup
from hone.workers.train import TrainHandle


class Teacher(Protocol):
    """A training engine that only infers (`TrainHandle`), or a rollout engine that scores."""

    def infer_batch(self, batch: Batch, needs: frozenset[Need] = frozenset()) -> ModelOutput:
        """`logprobs` [T] of the tokens with a loss; for `TopK` also `extras["top_k_ids"]`, `["top_k_logprobs"]`."""


class TeacherChoice:
    """Which teacher judges the answers to a prompt, by a column of its row."""

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

    def __init__(self, teachers: Sequence[Teacher], distillation: Distillation, recorder: Recorder) -> None:
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
        views = [self._teachers[number].infer_batch(select(batch, mine[number]), self._needs) for number in busy]

        def joined(pieces: Sequence[Any]) -> torch.Tensor:
            return restore(pieces, parts, batch.cu_seqlens)

        batch = TEACHER_LOGPROBS.on(batch, joined([view.logprobs for view in views]))
        if self._needs:
            batch = batch.with_(ids_at=joined([view.extras["top_k_ids"] for view in views]))
            batch = TOP_K_LOGPROBS.on(batch, joined([view.extras["top_k_logprobs"] for view in views]))
        self._recorder.record(self._distillation.measure(batch))
        return self._distillation.before_advantages(batch)
