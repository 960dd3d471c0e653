"""A reference that moves towards the policy while it learns."""

from __future__ import annotations

from collections.abc import Mapping

from hone.config import ConfigError
from hone.engines.settings import EngineConfig
from hone.runtime import ranks
from hone.trainers.run.settings import FollowConfig, ReferenceConfig
from hone.types import Batch
from hone.workers.train import TrainHandle


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
