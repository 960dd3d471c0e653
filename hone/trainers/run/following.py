"""A reference that follows the policy: when it moves, and which settings it cannot be combined with."""

from __future__ import annotations

from collections.abc import Mapping

from hone.config import ConfigError
from hone.engines.settings import EngineConfig
from hone.runtime import ranks
from hone.trainers.run.settings import FollowConfig, ReferenceConfig
from hone.workers.train import TrainHandle


class Following:
    """A reference that follows the policy."""

    def __init__(self, reference: TrainHandle, settings: FollowConfig) -> None:
        """The spec of `reference` has `follows`."""
        self.reference = reference
        self._every_steps = settings.every_steps
        self._mixup = settings.mixup

    def is_due(self, step: int) -> bool:
        """Whether the reference moves after this step."""
        return step % self._every_steps == 0

    def move(self, policy: TrainHandle) -> None:
        """Move the reference towards the policy. Raises RankLost if another rank does not answer."""
        with ranks.answered("in the move of the reference"):  # ranks gather the policy's weights between two calls
            self.reference.follow(policy, self._mixup)


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
