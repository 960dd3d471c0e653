"""The models that train on the mini-batches of a step. `following` has a reference that moves towards the policy."""

from __future__ import annotations

from typing import Protocol

from hone.types import Batch, LossFn
from hone.workers.train import TrainHandle


class Learner(Protocol):
    """A model that changes while the policy learns."""

    model: TrainHandle

    def learn(self, minibatch: Batch, step: int) -> None:
        """Change with one optimizer step of the policy."""

    def end(self, step: int) -> None:
        """Change after the last mini-batch of a step, also of one that had nothing to train on."""


class Trained:
    """A model that takes an optimizer step on each mini-batch, from step `first` on."""

    def __init__(self, model: TrainHandle, loss: LossFn, first: int = 1) -> None:
        self.model = model
        self._loss = loss
        self._first = first

    def learn(self, minibatch: Batch, step: int) -> None:
        if step >= self._first:
            self.model.train_batch(minibatch, self._loss)

    def end(self, step: int) -> None:
        """Does nothing: the mini-batches were all."""
