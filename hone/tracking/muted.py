"""Tracking of the ranks that do not write: of several processes of one run, the first keeps the record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hone.tracking.hub import Tracking
from hone.tracking.rollouts import TrainerLogprobs
from hone.types import TrajectoryGroup


class MutedTracking(Tracking):
    """Takes everything and writes nothing; the settings are read, so that they count as read on every rank."""

    def begin(self, step: int) -> None:
        """No tracker is started."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The first rank logs the same."""

    def rollouts(
        self, step: int, groups: Sequence[TrajectoryGroup], trainer_logprobs: TrainerLogprobs | None = None
    ) -> None:
        """The first rank writes the same."""

    def evaluated(self, step: int, name: str, groups: Sequence[TrajectoryGroup]) -> None:
        """The first rank writes the same."""

    def message(self, text: str) -> None:
        """The first rank says the same."""
