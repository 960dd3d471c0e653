"""What a policy trainer on many ranks holds of the rollout, the rewards and rollout teachers: the first rank has them.

Each speaks as its original does. The first rank does the work, the others hear what came of it, and whoever is needed
on the way (weights from all ranks, a colocated reward model) takes part (`hone.runtime.lead`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hone.envs.episode import Play
from hone.runtime.lead import Lead
from hone.trainers.playing import Player
from hone.trainers.teachers import Teacher
from hone.types import Batch, Completion, Image, Metrics, ModelOutput, Prompt, SamplingParams, TrajectoryGroup
from hone.workers.handles import RolloutHandle, TrainHandle


async def generates_elsewhere(
    request_id: str, token_ids: tuple[int, ...], sampling: SamplingParams, images: tuple[Image, ...] = ()
) -> Completion:
    """The `generate` of a rank without a rollout: whoever calls it has taken a wrong turn."""
    raise RuntimeError(f"request {request_id!r}: only the first rank generates")


class LedPlayer:
    """Plays on the first rank; every rank has drawn the same prompts, so only what was sampled is told."""

    def __init__(self, player: Player | None, lead: Lead) -> None:
        """`player` is the first rank's."""
        self._player = player
        self._lead = lead

    def play(self, prompts: Sequence[Prompt], play: Play) -> list[TrajectoryGroup]:
        def work() -> list[TrajectoryGroup]:
            assert self._player is not None  # only the first rank works
            return [_told(group) for group in self._player.play(prompts, play)]

        told = self._lead.run(work)
        return [_put_back(group, prompt) for group, prompt in zip(told, prompts, strict=True)]

    def metrics(self) -> Metrics:
        """What the first rank has counted: it is the one that writes."""
        return {} if self._player is None else self._player.metrics()


def _told(group: TrajectoryGroup) -> TrajectoryGroup:
    """Without what every rank has drawn itself: the prompt, and its images."""
    return replace(_each(group, ()), prompt=None)  # type: ignore[arg-type]  `_put_back` follows


def _put_back(group: TrajectoryGroup, prompt: Prompt) -> TrajectoryGroup:
    return replace(_each(group, prompt.images), prompt=prompt)


def _each(group: TrajectoryGroup, images: tuple[Image, ...]) -> TrajectoryGroup:
    greedy = group.greedy.with_(images=images) if group.greedy is not None else None
    return replace(group, trajectories=tuple(one.with_(images=images) for one in group.trajectories), greedy=greedy)


class LedRollout:
    """Takes the weights of all ranks on the first."""

    def __init__(self, rollout: RolloutHandle | None, lead: Lead) -> None:
        """`rollout` is the first rank's."""
        self._rollout = rollout
        self._lead = lead

    def make_room(self) -> None:
        """Return when the rollout has given back its memory on the devices of all ranks."""

        def work() -> None:
            assert self._rollout is not None
            self._rollout.make_room()

        self._lead.run(work)

    def sync_from(self, actor: TrainHandle, version: int) -> Metrics:
        def work() -> Metrics:
            assert self._rollout is not None
            return self._rollout.sync_from(actor, version)

        return self._lead.run(work)


class LedTeacher:
    """A teacher in a rollout engine of the first rank."""

    def __init__(self, teacher: Teacher | None, lead: Lead) -> None:
        """`teacher` is the first rank's."""
        self._teacher = teacher
        self._lead = lead

    def infer_batch(self, batch: Batch, needs: frozenset[str] = frozenset()) -> ModelOutput:
        def work() -> ModelOutput:
            assert self._teacher is not None
            return self._teacher.infer_batch(batch, needs)

        return self._lead.run(work)


__all__ = ["LedPlayer", "LedRollout", "LedTeacher", "generates_elsewhere"]
