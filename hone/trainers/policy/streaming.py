"""A step that trains each mini-batch as soon as its groups are there (`asynchrony.stream`).

    take mini-batch 1 --> journal --> train --> take mini-batch 2 --> journal --> train --> publish
                                        ^ the answers of mini-batch 2 may still be written here

Groups that are kept count in draw order: mini-batch k has the same ones as without streaming, wherever filters have
dropped some. All metrics of groups and advantages are measured over the whole step, so they are the same, too. Only a
step that ends with fewer groups than `update.prompts_per_step` differs: its first mini-batches have trained in their
full size by then, so its last one is smaller or missing, where a whole batch is divided evenly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from hone.data.packing import groups_of, pack, select
from hone.trainers.policy.collection import RolloutLog
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.policy.trainer import PolicyParts, PolicyTrainer
from hone.trainers.run.context import RunContext
from hone.types import Batch, TrajectoryGroup
from hone.workers.train import TrainHandle


class StreamingTrainer(PolicyTrainer):
    """A policy trainer that trains all mini-batches of a step but the last while it collects them.

    `check_policy_run` has refused what needs the whole batch before the first of its updates.
    """

    def __init__(self, config: PolicyRunConfig, parts: PolicyParts, context: RunContext) -> None:
        super().__init__(config, parts, context)
        per_step = config.tracking.rollouts_per_step
        self.rollout_log = RolloutLogWithoutGap(context.tracking, None if per_step == "all" else per_step)
        count, whole = self.minibatches, self.prompts_per_step
        self._edges = [whole * place // count for place in range(1, count + 1)]  # as `minibatches` cuts a whole batch
        self._kept: list[TrajectoryGroup] = []  # of this step so far, in draw order
        self._trained = 0  # how many of these have been trained
        self._unrecorded: list[TrajectoryGroup] = []  # groups, dropped ones included, that the journal does not have

    def collect(self, step: int) -> Batch | None:
        """Collect the batch of a step and train every mini-batch of it but the last."""
        self._kept, self._trained, self._unrecorded = [], 0, []
        return super().collect(step)

    def play_round(self, missing: int, step: int) -> list[TrajectoryGroup]:
        prompts = self.supply.draw(self.feed.room(missing, step))
        self.feed.admit(prompts, self.play.at(step), missing, self.supply.before)
        self.recorder.record(self.supply.metrics())
        played: list[TrajectoryGroup] = []
        while len(played) < missing:
            edge = next(edge for edge in self._edges if edge > len(self._kept))
            taken = self.feed.take(min(edge - len(self._kept), missing - len(played)))
            played += taken
            kept, dropped = self.algorithm.groups.sort(self.algorithm.groups.shape(taken))
            self._kept += kept
            self._unrecorded += [*kept, *(one.group for one in dropped)]
            if len(self._kept) == edge < self.prompts_per_step:
                self.train_early(step)
        return played

    def train_early(self, step: int) -> None:
        """Train the mini-batch of the groups that are there, once the journal has it."""
        batch = pack(self._kept[self._trained :])
        self.feed.commit_part(step, self._unrecorded, batch)
        batch = self.algorithm.advantages(batch)
        self.train(batch, [self.algorithm.weigh(batch)], step)
        self._trained, self._unrecorded = len(self._kept), []

    def cut(self, batch: Batch, step: int) -> Iterator[Batch]:
        """The last mini-batch of the step, if it has groups."""
        rows = list(chain.from_iterable(groups_of(batch)[self._trained :]))
        if rows:
            yield self.algorithm.weigh(select(batch, rows))


class RolloutLogWithoutGap(RolloutLog):
    """Leaves `logprob_gap` empty: when a step's groups are all there, the weights before its updates are gone."""

    def write(self, step: int, played: Sequence[TrajectoryGroup], batch: Batch | None, actor: TrainHandle) -> None:
        super().write(step, played, None, actor)


__all__ = ["StreamingTrainer"]
