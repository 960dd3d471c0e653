"""Tracking on ranks other than the first, which alone writes the record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hone.tracking.hub import Tracking
from hone.tracking.rollouts import ByPlace
from hone.types import TrajectoryGroup


class MutedTracking(Tracking):
    """Accepts every call and writes nothing. It reads the settings, so that they count as read on every rank."""

    def begin(self, step: int) -> None:
        """Start no tracker."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Do nothing: the first rank logs it."""

    def rollouts(self, step: int, groups: Sequence[TrajectoryGroup], of_trainer: ByPlace | None = None) -> None:
        """Do nothing: the first rank writes it."""

    def evaluated(self, step: int, name: str, groups: Sequence[TrajectoryGroup]) -> None:
        """Do nothing: the first rank writes it."""

    def message(self, text: str) -> None:
        """Do nothing: the first rank shows it."""
