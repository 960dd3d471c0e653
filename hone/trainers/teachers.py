"""Teachers: whoever says how likely it finds the tokens that the policy sampled, and which rows each of them judges.

groups --assign--> batch (a teacher for each sequence) --advise--> with the teachers' view, and rewards
batch with advantages --credit--> batch with the teachers' part in them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from hone.algorithms.distillation import IDS, TEACHER, TEACHER_TOP_K, Distillation
from hone.algorithms.segments import spread
from hone.data.packing import restore, select
from hone.registry import unknown
from hone.trainers.recorder import Recorder
from hone.trainers.settings import TeachersConfig
from hone.types import Batch, LossFn, ModelOutput, Prompt, TrajectoryGroup

ASSIGNED = "teacher"  # of Batch.extras, [T] int64: number of the teacher that judges the token's sequence


class Teacher(Protocol):
    """A model that judges: a training engine that only infers (`TrainHandle`), or a rollout engine that scores."""

    def infer_batch(self, batch: Batch, needs: frozenset[str] = frozenset()) -> ModelOutput:
        """`logprobs` [T] of the tokens with a loss; for "top_k:K" also `extras["top_k_ids"]`, `["top_k_logprobs"]`."""


class Teachers:
    """The teachers of a run by name, and what their view changes."""

    def __init__(
        self, config: TeachersConfig, teachers: Mapping[str, Teacher], distillation: Distillation, recorder: Recorder
    ) -> None:
        self._field = config.teacher_field
        self._names = list(teachers)
        self._teachers = list(teachers.values())
        self._distillation = distillation
        self._recorder = recorder
        top_k = distillation.top_k
        self._needs: frozenset[str] = frozenset({f"top_k:{top_k}"} if top_k else ())

    @property
    def needs_old_logprobs(self) -> bool:
        return self._distillation.needs_old_logprobs

    def objective(self, policy: LossFn) -> LossFn:
        """The actor's loss."""
        return self._distillation.objective(policy)

    def number_of(self, prompt: Prompt) -> int:
        """Which teacher judges the answers to a prompt. Raises ValueError naming the row and the nearest teacher."""
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

    def require(self, prompts: Sequence[Prompt]) -> None:
        """Raise ValueError, before anything is generated, for a prompt that no teacher is there for."""
        for prompt in prompts:
            self.number_of(prompt)

    def assign(self, batch: Batch, groups: Sequence[TrajectoryGroup]) -> Batch:
        """The batch that was packed from `groups`, with the teacher of each sequence."""
        numbers = torch.tensor([self.number_of(group.prompt) for group in groups])
        return _with(batch, **{ASSIGNED: spread(numbers[batch.group_index], batch.cu_seqlens)})

    def advise(self, batch: Batch) -> Batch:
        """The batch with its teachers' view of it, each sequence seen by its own, and with the rewards that follow."""
        assigned = batch.extras[ASSIGNED][batch.cu_seqlens[:-1]]
        mine = [(assigned == number).nonzero()[:, 0].tolist() for number in range(len(self._teachers))]
        busy = [number for number, rows in enumerate(mine) if rows]
        parts = [mine[number] for number in busy]
        views = [self._teachers[number].infer_batch(select(batch, mine[number]), self._needs) for number in busy]
        found = {TEACHER: [view.logprobs for view in views]}
        if self._needs:
            found |= {IDS: [view.extras["top_k_ids"] for view in views]}
            found |= {TEACHER_TOP_K: [view.extras["top_k_logprobs"] for view in views]}
        batch = _with(batch, **{name: restore(pieces, parts, batch.cu_seqlens) for name, pieces in found.items()})
        self._recorder.record(self._distillation.measure(batch))
        return self._distillation.before_advantages(batch)

    def credit(self, batch: Batch) -> Batch:
        """The batch whose advantages say what the teachers' part in them is."""
        return self._distillation.after_advantages(batch)


def _with(batch: Batch, **extras: Any) -> Batch:
    return batch.with_(extras={**batch.extras, **extras})
