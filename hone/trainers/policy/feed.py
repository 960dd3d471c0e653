"""Supply of the trainer: groups in draw order, generated in turns with training or ahead of it.

    trainer's thread            admit ------------------------- take --> train --> publish -------------------------.
                                  | prompts                      ^ scored groups, in draw order        a copy of the |
                                  v                              |                                          weights v
    staleness 0                  (kept until `take`)    the same thread drives the loop          the same thread sends
    event loop's own thread     [ one coroutine for each draw: generate --> reward ]      [ sends them while training  ]
    (staleness > 0)                  ^ a replica whose weights the draw may be sampled from <-----------------'

`Window` decides how many prompts are drawn ahead and which weights may answer each. `take` waits for the open draws
with the smallest numbers, so which prompts a batch holds never depends on time. With `asynchrony.new_weights: finish`
an answer is sampled from one version, so its tokens do not either. The watchdog (`runtime.stall_timeout_s`) bounds the
wait: an answer, or a step of the trainer, has to arrive within that time.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

from hone.data.packing import columns
from hone.data.stream import PromptStream
from hone.envs.episode import Play
from hone.schedule.journal import Journal
from hone.schedule.open_draws import read_groups, write_groups
from hone.schedule.window import Enough, OpenDraw, Window
from hone.trainers.policy.collection import Collector
from hone.trainers.run.checkpoints import Checkpoint
from hone.trainers.run.recorder import Recorder
from hone.types import COLUMNS, Batch, Metric, Metrics, Prompt, Trajectory, TrajectoryGroup
from hone.workers.rollout_role import RolloutHandle
from hone.workers.train import TrainHandle

PART = "draws"  # folder of a checkpoint
LOOK_S = 1.0  # between two looks at answers that the trainer waits for

Group = Future[TrajectoryGroup]


@dataclass(frozen=True, slots=True)
class Draw:
    """An open draw, as the trainer keeps it."""

    prompt: Prompt
    play: Play
    before: Mapping[str, Any]  # position of the prompt stream before this prompt was drawn
    group: Group | None  # being played on the event loop; None: played in `take`


class OpenAnswersLate(TimeoutError):
    """Open answers did not end within `asynchrony.drain_timeout_s`."""


class Feed:
    """The groups of a run in draw order. Synchronous training is this with `Window.staleness` 0."""

    def __init__(
        self,
        window: Window,
        collector: Collector,
        rollout: RolloutHandle,
        recorder: Recorder,
        journal: Journal,
        drain_timeout_s: float,
    ) -> None:
        self._window = window
        self._collector = collector
        self._rollout = rollout
        self._recorder = recorder
        self._journal = journal
        self._drain_timeout_s = drain_timeout_s
        self._draws: dict[int, Draw] = {}
        self._admitted: list[int] = []  # since the journal's last record
        self._recorded: set[int] = set()  # draws of this step that the journal has already
        self._settled: Mapping[int, Draw] = {}  # open draws of the last settled step
        self._unwritten: tuple[Path, Mapping[int, Draw]] | None = None

    @property
    def ahead(self) -> Collection[int]:
        """The draws that later steps take."""
        return self._draws.keys()

    @property
    def version(self) -> int:
        """Of the weights that are trained next."""
        return self._window.version

    # ------------------------------------------------------------------------------------------------- a step's groups

    def room(self, short: int, step: int) -> int:
        """Return the number of prompts to draw in `step`, which still takes `short` groups."""
        return self._window.room(short, step)

    def admit(self, prompts: Sequence[Prompt], play: Play, short: int, before: Mapping[str, Any]) -> None:
        """Begin to play prompts in a step that still takes `short` groups.

        `before` is the position of the prompt stream before they were drawn.
        """
        numbers = [prompt.draw for prompt in prompts]
        self._window = self._window.admitted(numbers, play.step, short)
        self._admitted += numbers
        drawn = self._window.open[len(self._window.open) - len(prompts) :]
        for prompt, one in zip(prompts, drawn, strict=True):
            group = self._start(prompt, play, one) if self._window.staleness else None
            self._draws[prompt.draw] = Draw(prompt, play, before, group)

    def _start(self, prompt: Prompt, play: Play, one: OpenDraw) -> Group:
        plan = self._journal.plan
        return self._collector.start(prompt, play, one.versions, None if plan is None else plan.draw(one.number))

    def take(self, count: int, enough: Enough | None = None) -> list[TrajectoryGroup]:
        """The groups of the `count` oldest open draws, in draw order; raises what the rollout engine raised.

        With `enough`, and staleness 0, they end with the group that makes it enough. The later draws are closed too:
        the caller puts their prompts back.
        """
        numbers = [one.number for one in self._window.open[:count]]
        draws = [self._draws[number] for number in numbers]
        played = [one.group for one in draws if one.group is not None]
        if played:
            is_late = any(not one.done() for one in played)
            with self._recorder.phase("trainer_wait"), self._rollout.lending() if is_late else nullcontext():
                _wait_for(played)
        groups = self._collector.complete([one.result(0) for one in played])
        if turn := [one for one in draws if one.group is None]:
            groups += self._collector.collect([one.prompt for one in turn], turn[0].play, enough=enough)
        self._window = self._window.taken(len(groups))
        if len(groups) < count:
            self._window = self._window.withdrawn()
        for number in numbers:
            del self._draws[number]
            if self._journal.plan is not None:
                self._journal.plan.ended(number)
        return groups

    def commit(self, step: int, played: Sequence[TrajectoryGroup], batch: Batch | None) -> None:
        """Hold the batch against the bound, and record the step, before its update begins; None: there is no update.

        Nothing is generated in this step any more, so a rollout on the trainer's devices frees their memory.
        Raises ScheduleError if a token that is trained is too old.
        """
        if batch is not None:
            self._rollout.make_room()
        if not self._window.staleness:
            return
        record = self._record(step, [group for group in played if group.prompt.draw not in self._recorded])
        self._recorded = set()
        if batch is not None:
            record["batch"] = _digest(batch)
            self._recorder.record({**self._measure(batch), **_spans_per_answer(played)})
        self._journal.write(record)

    def commit_part(self, step: int, groups: Sequence[TrajectoryGroup], minibatch: Batch) -> None:
        """Do the same for a mini-batch that trains before the others of its step are there.

        `groups` holds the step's groups that no record has yet; `commit` records the rest.
        """
        self._window.ages(_version_counts(minibatch))
        self._journal.write({**self._record(step, groups), "more": True})
        self._recorded |= {group.prompt.draw for group in groups}

    def _record(self, step: int, groups: Sequence[TrajectoryGroup]) -> dict[str, Any]:
        """Return the fate of these groups, and the prompts that were admitted since the last record."""
        admitted, self._admitted = self._admitted, []
        return {
            "step": step,
            "version": self.version,
            "admitted": admitted,
            "taken": sorted(group.prompt.draw for group in groups),
            "dropped": {str(group.prompt.draw): _reason(group) for group in groups if not group.trainable},
            "spans": {str(one.prompt.draw): [_spans(answer) for answer in _answers(one)] for one in groups},
        }

    def publish(self, actor: TrainHandle, version: int) -> Metrics:
        """Publish the actor's new weights; return when the actor may train again."""
        self._window = self._window.trained(version)
        return self._rollout.publish(actor, version)

    def versions_of_evaluation(self) -> tuple[int, int] | None:
        """Wait until every replica serves the newest weights, and nothing else is answered; None: they always do.

        Raises OpenAnswersLate.
        """
        if not self._window.staleness:
            return None
        left = _wait_for(_unended(self._draws), self._drain_timeout_s)
        if left:
            raise OpenAnswersLate(
                f"an evaluation waits for the answers to draws {sorted(self._draws)}, and {left} of them did not end "
                f"within asynchrony.drain_timeout_s = {self._drain_timeout_s:g} s"
            )
        self._rollout.wait_for(self.version, self._drain_timeout_s)
        return self.version, self.version

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The window of a step that has ended, as JSON-compatible data; `write` saves the groups of its open draws."""
        self._settled = dict(self._draws)
        oldest = min(self._settled, default=None)
        before = None if oldest is None else self._settled[oldest].before
        return {"window": self._window.state_dict(), "before": before}

    @property
    def has_groups(self) -> bool:
        """Return whether the last settled step left draws open."""
        return bool(self._settled)

    def write(self, folder: Path) -> None:
        """Save the groups of the last settled step's open draws into a checkpoint, when their answers have ended."""
        self._unwritten = folder, self._settled

    def written(self, wait_until: bool) -> bool:
        """Return whether these groups are on the disk. With `wait_until`, those that are late are left out."""
        if self._unwritten is None:
            return True
        folder, draws = self._unwritten
        if left := _unended(draws):
            if not wait_until:
                return False
            # a group that failed is left out, too: the trainer raises its failure
            wait(left, self._drain_timeout_s if self._collector.responds else 0.0)
        ended = [one.group for one in draws.values() if one.group is not None and one.group.done()]
        write_groups(folder, [one.result(0) for one in ended if one.exception(0) is None])
        self._unwritten = None
        return True

    def restore(self, checkpoint: Checkpoint, prompts: PromptStream, play: Play, actor: TrainHandle) -> None:
        """Continue from a checkpoint: send its weights, and give the open draws their groups.

        A draw whose answers the checkpoint lacks is played again, from these weights.
        """
        state = checkpoint.state["feed"]
        self._window = self._window.restored(state["window"])
        self._rollout.sync_from(actor, self.version)
        numbers = {one.number for one in self._window.open}
        drawn: dict[int, Prompt] = {}
        groups: dict[int, TrajectoryGroup] = {}
        if numbers:
            drawn = {prompt.draw: prompt for prompt in prompts.since(state["before"])}
            groups = read_groups(checkpoint.part(PART), drawn)
        if self._journal.plan is not None:
            self._journal.plan.resumed(self.version, numbers - groups.keys(), sum(prompts.taken.values()))
        self._window = self._window.reopened(numbers - groups.keys())
        for one in self._window.open:
            prompt, again = drawn[one.number], play.at(one.step)
            if one.number in groups:
                group = _ended(groups[one.number])
            else:
                group = self._start(prompt, again, one)
            self._draws[one.number] = Draw(prompt, again, state["before"], group)

    # ------------------------------------------------------------------------------------------------------- its parts

    def _measure(self, batch: Batch) -> Metrics:
        """Measure the age of a batch's tokens in updates, and count the answers that wait for later steps."""
        counts = _version_counts(batch)
        ages = self._window.ages(counts)
        total = counts.total()
        of_age = {age: sum(counts[version] for version in counts if ages[version] == age) for age in ages.values()}
        metrics = {f"schedule/staleness_{age}": Metric.mean(count / total, total) for age, count in of_age.items()}
        return {
            **metrics,
            "schedule/staleness": Metric.mean(sum(age * count for age, count in of_age.items()) / total, total),
            "schedule/staleness_max": Metric.max(max(of_age)),
            "schedule/draws_ahead": Metric.sum(len(self._draws)),
            "perf/draws_ended_ahead": Metric.sum(len(self._draws) - len(_unended(self._draws))),
        }


def _unended(draws: Mapping[int, Draw]) -> list[Group]:
    return [one.group for one in draws.values() if one.group is not None and not one.group.done()]


def _wait_for(groups: Sequence[Group], timeout_s: float = inf) -> int:
    """Wait until all groups are there, and return how many are not after `timeout_s`. Raises a group's failure."""
    deadline = monotonic() + timeout_s
    while True:
        done, left = wait(groups, min(LOOK_S, max(deadline - monotonic(), 0.0)), FIRST_EXCEPTION)
        for one in done:
            one.result(0)
        if not left or monotonic() > deadline:
            return len(left)


def _ended(group: TrajectoryGroup) -> Group:
    ended: Group = Future()
    ended.set_result(group)
    return ended


def _version_counts(batch: Batch) -> Counter[int]:
    """Version -> the trained tokens that it sampled."""
    assert batch.weight_versions is not None
    return Counter(batch.weight_versions[batch.loss_mask].tolist())


def _spans(one: Trajectory) -> list[list[int]]:
    """[version, tokens] of each run of sampled tokens from one version."""
    versions = [version for version, mask in zip(one.weight_versions, one.loss_mask, strict=True) if mask]
    return [[version, len(list(run))] for version, run in groupby(versions)]


def _spans_per_answer(played: Sequence[TrajectoryGroup]) -> Metrics:
    spans = [len(_spans(one)) for group in played for one in _answers(group)]
    return {"schedule/spans_per_answer": Metric.mean(sum(spans) / len(spans), len(spans))}


def _answers(group: TrajectoryGroup) -> list[Trajectory]:
    """All answers to a prompt; the greedy one, if there is one, is the last."""
    return [*group.trajectories, *([group.greedy] if group.greedy is not None else [])]


def _reason(group: TrajectoryGroup) -> str:
    return next((one.error for one in group.trajectories if one.error), "")


def _digest(batch: Batch) -> str:
    """A digest of what the rollout sampled: equal batches have equal ones."""
    digest = hashlib.blake2b(digest_size=16)
    for (name, _), _, values in columns(batch):
        if COLUMNS[name].sampled:
            digest.update(values.cpu().numpy().tobytes())
    return digest.hexdigest()


__all__ = ["PART", "Feed", "OpenAnswersLate"]
