"""The models that change in a step: those that train on its mini-batches, and a reference that follows the policy."""

from __future__ import annotations

from typing import Protocol

from hone.trainers.run.following import Following
from hone.types import Batch, LossFn
from hone.workers.train import TrainHandle


class Learner(Protocol):
    """A model that changes while the policy learns."""

    @property
    def model(self) -> TrainHandle: ...

    def learn(self, minibatch: Batch, step: int) -> None:
        """Change with one optimizer step of the policy."""

    def end(self, step: int) -> None:
        """Change once after the last mini-batch of a step, or without one if the step had nothing to train on."""


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


class Follower:
    """A reference that moves towards the policy after steps."""

    def __init__(self, following: Following, policy: TrainHandle) -> None:
        self.model = following.reference
        self._following = following
        self._policy = policy

    def learn(self, minibatch: Batch, step: int) -> None:
        """Does nothing: it moves between steps."""

    def end(self, step: int) -> None:
        if self._following.is_due(step):
            self._following.move(self._policy)
