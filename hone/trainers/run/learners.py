"""The models that change in a step: those that train on its mini-batches, and a reference that follows the policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from hone.config import ConfigError
from hone.engines.settings import EngineConfig
from hone.runtime import ranks
from hone.trainers.run.settings import FollowConfig, ReferenceConfig
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


class Follower:
    """A reference that moves towards the policy, every so many steps."""

    def __init__(self, reference: TrainHandle, policy: TrainHandle, settings: FollowConfig) -> None:
        """The spec of `reference` has `follows`."""
        self.model = reference
        self._policy = policy
        self._every_steps = settings.every_steps
        self._mixup = settings.mixup

    def learn(self, minibatch: Batch, step: int) -> None:
        """Does nothing: it moves between steps."""

    def end(self, step: int) -> None:
        """Move the reference, if it is due. Raises RankLost if another rank does not answer."""
        if step % self._every_steps == 0:
            with ranks.answered("in the move of the reference"):  # ranks gather the policy's weights between two calls
                self.model.follow(self._policy, self._mixup)


def check_follow(reference: ReferenceConfig, policy: EngineConfig, others: Mapping[str, str]) -> None:
    """Raise ConfigError for a setting that `reference.follow` cannot be combined with.

    `others` has the further ones that this run sets, each with the reason.
    """
    clashes = {}
    if reference.model is not None:
        clashes["reference.model"] = "a reference that follows begins as the policy before training"
    if policy.lora is not None:
        clashes["actor.lora"] = "the reference is the policy without its adapter, whose weights never change"
    for key, reason in (clashes | dict(others)).items():
        raise ConfigError(f"reference.follow cannot be combined with {key}: {reason}; remove one of them")
