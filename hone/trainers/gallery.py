"""Shows people what was asked, answered and rewarded: some trajectories of each step, with their log-prob gaps."""

from __future__ import annotations

from collections.abc import Sequence

from hone.data.packing import select
from hone.tracking.hub import Tracking
from hone.tracking.rollouts import places_to_keep
from hone.types import Batch, TrajectoryGroup
from hone.workers.handles import TrainHandle

Place = tuple[int, int]  # group, trajectory within the group


class Gallery:
    """Writes down the trajectories that the trackers will keep, and asks the actor for its log-probs of these only."""

    def __init__(self, tracking: Tracking, per_step: int | None) -> None:
        self._tracking = tracking
        self._per_step = per_step  # None: all of them

    def show(self, step: int, played: Sequence[TrajectoryGroup], batch: Batch | None, actor: TrainHandle) -> None:
        """Hand over a step's trajectories, dropped groups included. `batch` holds those that are trained on, if any.

        Called before the update, so that the trainer's log-probs are of the weights that sampled.
        """
        if self._per_step == 0:
            return
        packed = _packed_places(played)
        chosen = [place for place in places_to_keep(played, self._per_step) if place in packed]
        logprobs: dict[Place, list[float]] = {}
        if chosen and batch is not None:
            part = select(batch, [packed[place] for place in chosen])
            found = actor.infer_batch(part).logprobs
            assert found is not None  # an actor is a language model
            split = found.split(part.lengths.tolist())
            logprobs = {place: one.tolist() for place, one in zip(chosen, split, strict=True)}
        self._tracking.rollouts(step, played, logprobs)


def _packed_places(played: Sequence[TrajectoryGroup]) -> dict[Place, int]:
    """Where in the packed batch each trainable trajectory is: `pack` takes them in their order."""
    trainable = [
        (i, j) for i, group in enumerate(played) for j, one in enumerate(group.trajectories) if one.status.trainable
    ]
    return {place: position for position, place in enumerate(trainable)}
