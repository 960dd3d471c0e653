"""A step that trains each mini-batch as soon as its groups are there (`asynchrony.stream`).

    take mini-batch 1 --> journal --> train --> take mini-batch 2 --> journal --> train --> publish
                                        ^ the answers of mini-batch 2 may still be written here

Groups that are kept count in draw order: mini-batch k has the same ones as without streaming, wherever filters have
dropped some. All metrics of groups and advantages are measured over the whole step, so they are the same, too. Only a
step that ends with fewer groups than `update.prompts_per_step` differs: its first mini-batches have trained in their
full size by then, so its last one is smaller or missing, where a whole batch is divided evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from hone.data.packing import groups_of, pack, select
from hone.envs.episode import Play
from hone.trainers.policy.collection import RolloutLog
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.policy.supply import PromptSupply, StepGroups
from hone.trainers.policy.trainer import PolicyParts, PolicyTrainer
from hone.trainers.run.context import RunContext
from hone.types import Batch, TrajectoryGroup
from hone.workers.train import TrainHandle

TrainFn = Callable[[int, Sequence[TrajectoryGroup], Sequence[TrajectoryGroup]], None]
"""Trains on the groups of a mini-batch in a step; the third argument has all that were played since the last call."""


class StreamingSupply(PromptSupply):
    """Takes the groups of a step mini-batch by mini-batch, and has all but the last trained as soon as it is whole."""

    train: TrainFn

    def __init__(self, *parts: Any, edges: Sequence[int]) -> None:
        """`edges`: how many groups the mini-batches up to each one have; `parts` are those of `PromptSupply`."""
        super().__init__(*parts)
        self._edges = edges
        self._kept: list[TrajectoryGroup] = []  # of this step so far, in draw order
        self._trained = 0  # how many of these have been trained
        self._unrecorded: list[TrajectoryGroup] = []  # groups, dropped ones included, that the journal does not have

    def collect(self, play: Play, count: int) -> StepGroups:
        self._kept, self._trained, self._unrecorded = [], 0, []
        return super().collect(play, count)

    def _take(self, wanted: int, missing: int, step: int) -> list[TrajectoryGroup]:
        played: list[TrajectoryGroup] = []
        while len(played) < missing:
            edge = next(edge for edge in self._edges if edge > len(self._kept))
            taken = self._feed.take(min(edge - len(self._kept), missing - len(played)))
            played += taken
            kept, dropped = self._groups.sort(self._groups.shape(taken))
            self._kept += kept
            self._unrecorded += [*kept, *(one.group for one in dropped)]
            if len(self._kept) == edge < self._edges[-1]:
                self.train(step, self._kept[self._trained :], self._unrecorded)
                self._trained, self._unrecorded = len(self._kept), []
        return played


class StreamingTrainer(PolicyTrainer):
    """A policy trainer that trains all mini-batches of a step but the last while it collects them.

    `check_policy_run` has refused what needs the whole batch before the first of its updates.
    """

    def __init__(self, config: PolicyRunConfig, parts: PolicyParts, context: RunContext) -> None:
        """The supply is a `StreamingSupply`."""
        super().__init__(config, parts, context)
        assert isinstance(parts.supply, StreamingSupply)
        parts.supply.train = self.train_early
        self._trained = 0  # groups of this step

    def step(self, step: int) -> None:
        self._trained = 0
        super().step(step)

    def train_early(self, step: int, groups: Sequence[TrajectoryGroup], unrecorded: Sequence[TrajectoryGroup]) -> None:
        """Train the mini-batch of the groups that are there, once the journal has it."""
        batch = pack(groups)
        self.feed.commit_part(step, unrecorded, batch)
        batch = self.algorithm.advantages(batch)
        self.learn(batch, [self.algorithm.weigh(batch)], step)
        self._trained += len(groups)

    def cut(self, batch: Batch, step: int) -> Iterator[Batch]:
        """The last mini-batch of the step, if it has groups."""
        rows = list(chain.from_iterable(groups_of(batch)[self._trained :]))
        if rows:
            yield self.algorithm.weigh(select(batch, rows))


def edges_of(prompts_per_step: int, minibatches: int) -> list[int]:
    """Return the number of groups up to the end of each mini-batch, as `hone.data.packing.minibatches` cuts a batch."""
    return [prompts_per_step * place // minibatches for place in range(1, minibatches + 1)]


class RolloutLogWithoutGap(RolloutLog):
    """Leaves `logprob_gap` empty: when a step's groups are all there, the weights before its updates are gone."""

    def infer(self, step: int, played: Sequence[TrajectoryGroup], batch: Batch | None, actor: TrainHandle) -> None:
        super().infer(step, played, None, actor)


__all__ = ["RolloutLogWithoutGap", "StreamingSupply", "StreamingTrainer", "edges_of"]
