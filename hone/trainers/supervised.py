"""Supervised training: samples in, one optimizer step out.

samples --take--> pack --> loss weights --> train_batch
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hone.algorithms.aggregation import loss_weights
from hone.algorithms.settings import AggregationSettings
from hone.config import count_as_read
from hone.data.packing import Sample, pack_samples
from hone.data.stream import SampleStream
from hone.trainers.base import Place, Trainer
from hone.trainers.checkpoints import Checkpoint, PartWriter
from hone.trainers.settings import CheckpointConfig
from hone.types import Batch, LossFn, Metric
from hone.workers.handles import TrainHandle


@dataclass(frozen=True, slots=True)
class SupervisedParts:
    """Everything a supervised trainer is wired from."""

    samples: SampleStream
    model: TrainHandle
    loss: LossFn
    aggregation: AggregationSettings
    held_out: Mapping[str, Sequence[Sample]]
    samples_per_step: int
    evaluate_every: int


class SupervisedTrainer(Trainer):
    """Minimises the loss of the masked tokens of packed samples."""

    def __init__(self, steps: int, checkpoint: CheckpointConfig, parts: SupervisedParts, place: Place) -> None:
        super().__init__(steps, checkpoint, place)
        self.samples = parts.samples
        self.model = parts.model
        self.loss = parts.loss
        count_as_read(parts.aggregation)  # read anew in every step
        self.aggregation = parts.aggregation
        self.held_out = parts.held_out
        self.samples_per_step = parts.samples_per_step
        self.evaluate_every = parts.evaluate_every

    def step(self, step: int) -> None:
        batch = self.collect()
        self.update_begins()
        self.model.train_batch(batch, self.loss)

    def collect(self) -> Batch:
        """The next samples as one packed batch that carries its loss weights."""
        batch = pack_samples(self.samples.take(self.samples_per_step))
        self.recorder.tokens(batch.num_tokens)
        self.recorder.record({"train/tokens": Metric.sum(batch.num_tokens)})
        return batch.with_(loss_weights=loss_weights(batch.loss_mask, batch.cu_seqlens, self.aggregation))

    def evaluate(self, step: int) -> dict[str, float]:
        due = step in (0, self.steps) or (self.evaluate_every > 0 and step % self.evaluate_every == 0)
        if not due:
            return {}
        with self.recorder.phase("evaluate"):
            return {f"eval/{name}/loss": self._mean_loss(samples) for name, samples in self.held_out.items()}

    def score_of(self, figures: Mapping[str, float]) -> float | None:
        """Lower loss is better: the first held-out set's, negated."""
        first = next(iter(self.held_out), None)
        key = f"eval/{first}/loss"
        return -figures[key] if first is not None and key in figures else None

    def parts(self) -> Mapping[str, PartWriter]:
        return {self.model.role: self.model.save_checkpoint}

    def state(self) -> dict[str, Any]:
        return {"samples": self.samples.state_dict()}

    def restore(self, checkpoint: Checkpoint) -> None:
        self.model.load_checkpoint(checkpoint.part(self.model.role))
        self.samples.load_state_dict(checkpoint.state["samples"])

    def finish(self) -> None:
        self.model.export_hf(self.folder / "export")

    def _mean_loss(self, samples: Sequence[Sample]) -> float:
        """Mean negative log-likelihood per masked token, in nats."""
        batch = pack_samples(samples)
        logprobs = self.model.infer_batch(batch).logprobs
        assert logprobs is not None
        return float(-torch.where(batch.loss_mask, logprobs, 0.0).sum() / batch.loss_mask.sum())
