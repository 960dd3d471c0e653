"""The supervised loop: items in, one optimizer step out. What an item is, and what is learnt from it, is the task's.

    source --take--> items --task.collate--> Batch with loss weights --train_batch(task.objective)--> one step

A task is a small object: samples to imitate (here), pairs and judged answers (`preference`), answers that a reward
model scores (`reward_tasks`). Every rank takes the same items; the worker group splits the batch over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from hone.algorithms.aggregation import loss_weights
from hone.algorithms.objective import SftObjective
from hone.algorithms.settings import AggregationSettings
from hone.config import count_as_read
from hone.data.packing import Sample, pack_samples
from hone.trainers.run.checkpoints import Checkpoint, PartWriter
from hone.trainers.run.context import RunContext
from hone.trainers.run.following import Follower
from hone.trainers.run.loop import Trainer
from hone.trainers.run.settings import CheckpointConfig
from hone.trainers.supervised.budget import RowBudget
from hone.types import Batch, LossFn, LossOutput, Metric
from hone.workers.train import TrainHandle

T = TypeVar("T")
Item = TypeVar("Item", contravariant=True)


class Source(Protocol[T]):
    """An endless stream of items whose position can be saved and restored."""

    def take(self, count: int) -> list[T]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Task(Protocol[Item]):
    """Turns items of one kind into batches, and names the loss."""

    @property
    def objective(self) -> LossFn:
        """The loss, per token."""

    @property
    def measures(self) -> Mapping[str, str]:
        """Return the figures of held-out sets: name of the figure -> name of the objective's metric."""

    def collate(self, items: Sequence[Item]) -> Batch:
        """Pack the items of one optimizer step, with loss weights and all other fields that the objective reads."""

    def prepare(self, coming: Iterator[Sequence[Item]], steps: int) -> None:
        """Called once before training, with the items of every evaluation set and of every step until the last one."""


class SftTask:
    """Imitate the learnt tokens of samples."""

    measures: Mapping[str, str] = {"loss": "train/nll"}

    def __init__(self, aggregation: AggregationSettings, max_tokens: int) -> None:
        """`max_tokens`: the token budget of a micro-batch."""
        count_as_read(aggregation)  # its values are read in every step
        self._budget = RowBudget(max_tokens)
        self._aggregation = aggregation
        self.objective: LossFn = SftObjective()

    def collate(self, items: Sequence[Sample]) -> Batch:
        """Raises DataError for a sample that does not fit into a micro-batch."""
        self._budget.check(items)
        return weighed(pack_samples(items), self._aggregation)

    def prepare(self, coming: Iterator[Sequence[Sample]], steps: int) -> None:
        """Does nothing: there is no reference."""


def weighed(batch: Batch, aggregation: AggregationSettings) -> Batch:
    """The batch with the factor of each token's loss, counted over all of it, before anything is cut or split."""
    return batch.with_(loss_weights=loss_weights(batch.loss_mask, batch.cu_seqlens, aggregation))


@dataclass(frozen=True, slots=True)
class SupervisedParts(Generic[T]):
    """Everything a supervised trainer is wired from."""

    source: Source[T]
    task: Task[T]
    model: TrainHandle
    held_out: Mapping[str, Sequence[T]]
    samples_per_step: int
    evaluate_every: int
    following: Follower | None = None


class SupervisedTrainer(Trainer, Generic[T]):
    """Takes one optimizer step on the next items; measures the same objective on held-out items."""

    def __init__(
        self, steps: int, checkpoint: CheckpointConfig, parts: SupervisedParts[T], context: RunContext
    ) -> None:
        super().__init__(steps, checkpoint, context, evaluates=bool(parts.held_out))
        self.source = parts.source
        self.task = parts.task
        self.model = parts.model
        self.held_out = parts.held_out
        self.samples_per_step = parts.samples_per_step
        self.evaluate_every = parts.evaluate_every
        self.following = parts.following

    def step(self, step: int) -> None:
        batch = self.collect()
        self.model.train_batch(batch, self.task.objective)
        if self.following is not None:
            self.following.end(step)

    def collect(self) -> Batch:
        """The next items as one packed batch that carries its loss weights."""
        batch = self.task.collate(self.source.take(self.samples_per_step))
        self.recorder.tokens(batch.num_tokens)
        self.recorder.record({"train/tokens": Metric.sum(batch.num_tokens)})
        return batch

    def resume(self) -> int:
        """Continue from the newest checkpoint, and let the task prepare for the remaining steps."""
        step = super().resume()
        position = self.source.state_dict()
        self.task.prepare(self._coming(self.steps - step), self.steps)
        self.source.load_state_dict(position)
        return step

    def _coming(self, steps: int) -> Iterator[Sequence[T]]:
        yield from self.held_out.values()
        for _ in range(steps):
            yield self.source.take(self.samples_per_step)

    def evaluate(self, step: int) -> dict[str, float]:
        due = step in (0, self.steps) or (self.evaluate_every > 0 and step % self.evaluate_every == 0)
        if not due:
            return {}
        with self.recorder.phase("evaluate"):
            measured = {name: self._measure(items) for name, items in self.held_out.items()}
        return {f"eval/{name}/{figure}": value for name, found in measured.items() for figure, value in found.items()}

    def _measure(self, items: Sequence[T]) -> dict[str, float]:
        """The objective's metrics on held-out items, without training on them."""
        batch = self.task.collate(items)
        needs: frozenset[str] = getattr(self.task.objective, "needs", frozenset())
        result = self.task.objective(self.model.infer_batch(batch, needs), batch)
        return {figure: mean_of(result, name, batch) for figure, name in self.task.measures.items()}

    def score_of(self, figures: Mapping[str, float]) -> float | None:
        """The negated loss of the first held-out set: higher is better.

        None with a reference that follows: losses against different references cannot be compared.
        """
        if self.following is not None:
            return None
        first = next(iter(self.held_out), None)
        key = f"eval/{first}/loss"
        return -figures[key] if first is not None and key in figures else None

    def changing_roles(self) -> list[TrainHandle]:
        return [self.model] if self.following is None else [self.model, self.following.model]

    def parts(self) -> Mapping[str, PartWriter]:
        return {role.role: role.save_checkpoint for role in self.changing_roles()}

    def written(self, wait: bool) -> bool:
        done = [role.checkpoint_written(wait) for role in self.changing_roles()]  # each is a meeting of its ranks
        return all(done)

    def state(self) -> dict[str, Any]:
        return {"samples": self.source.state_dict()}

    def restore(self, checkpoint: Checkpoint) -> None:
        for role in self.changing_roles():
            role.load_checkpoint(checkpoint.part(role.role))
        self.source.load_state_dict(checkpoint.state["samples"])

    def export(self, folder: Path) -> None:
        self.model.export(folder, self.folder / "adapter")


def mean_of(result: LossOutput, name: str, batch: Batch) -> float:
    """The mean of one of an objective's metrics over the tokens that it counts, as in training."""
    counted = result.counted.get(name, batch.loss_mask)
    return float(result.metrics[name][counted].double().mean())
