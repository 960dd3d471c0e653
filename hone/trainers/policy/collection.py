"""Turns prompts into scored groups, and writes some of them for people to read, with the trainer's log-probs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace

from hone.data.packing import select
from hone.envs.episode import Play, first_failure
from hone.envs.runners import Runner
from hone.rewards.rubric import Rubric
from hone.schedule.replay import RecordedDraw
from hone.schedule.window import Enough
from hone.tracking.hub import Tracking
from hone.tracking.rollouts import OfTrainer, places_to_keep
from hone.trainers.run.event_loop import EventLoop
from hone.trainers.run.recorder import Recorder
from hone.types import (
    Batch,
    Completion,
    GenerateFn,
    GenerationRequest,
    Metric,
    Metrics,
    Prompt,
    TrajectoryGroup,
    Versions,
)
from hone.workers.rollout_role import RolloutHandle
from hone.workers.train import TrainHandle

Position = tuple[int, int]  # group, trajectory within the group


class Collector:
    """Turns prompts into scored groups; training and evaluation share one."""

    def __init__(
        self,
        runner: Runner,
        rollout: RolloutHandle,
        rubric: Rubric,
        loop: EventLoop,
        recorder: Recorder,
    ) -> None:
        self._runner = runner
        self._rollout = rollout
        self._loop = loop
        self._recorder = recorder
        self._rubric = rubric
        self._last_token = 0.0

    def collect(
        self,
        prompts: Sequence[Prompt],
        play: Play,
        versions: tuple[int, int] | None = None,
        enough: Enough | None = None,
    ) -> list[TrajectoryGroup]:
        """The scored groups of `prompts`, in order, sampled from weights within `versions`; None: any.

        With `enough` they end with the group that makes it enough, and the answers to later prompts are aborted.
        The time until the last generated token counts as generation, the rest as reward. Reward models in this process
        run when all answers are complete. Errors of the rollout engine are raised; a reward or environment that fails
        sets the status of its trajectory.
        """
        with self._recorder.phase("generate"):
            self._last_token = time.perf_counter()  # if nothing is generated, all of it is waiting
            play = replace(play, generate=self._within(versions))
            # A reward model in this process scores all answers at the end, so no group can be judged before that.
            if enough is None or self._rubric.has_colocated:
                groups = self._loop.run(self._runner.run(prompts, play, self._rubric.score))
            else:
                groups = self._loop.run(self._play_until(enough, prompts, play))
            self._recorder.timer.move(time.perf_counter() - self._last_token, "reward")
        groups = self.complete(groups)
        return groups if enough is None else enough.first(groups)

    async def _play_until(self, enough: Enough, prompts: Sequence[Prompt], play: Play) -> list[TrajectoryGroup]:
        """Play all prompts at once, until the groups of the first ones are enough; then end the others."""
        groups: list[TrajectoryGroup] = []
        kept = 0
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._runner.run([one], play, self._rubric.score)) for one in prompts]
                for task in running:
                    groups += await task
                    kept += enough.keeps(groups[-1])
                    if kept == enough.groups:
                        break
                unused = running[len(groups) :]
                ended = sum(task.done() for task in unused)
                if ended < len(unused):
                    await self._rollout.abort_all()  # before the weights change, every server has ended its requests
                for task in unused:
                    task.cancel()
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from failures
        self._recorder.record({"perf/unused_groups_ended": Metric.sum(ended)})
        return groups

    def start(
        self, prompt: Prompt, play: Play, versions: tuple[int, int], recorded: RecordedDraw | None = None
    ) -> Future[TrajectoryGroup]:
        """Play and score one prompt while the caller goes on; `complete` its group when it is there.

        `recorded`: sample each token from the version that sampled it before, instead of any of `versions`.
        """
        if recorded is not None:
            return self._loop.start(self._replay_one(prompt, play, recorded))
        return self._loop.start(self._play_one(prompt, play, versions))

    async def _replay_one(self, prompt: Prompt, play: Play, recorded: RecordedDraw) -> TrajectoryGroup:
        async def generate(request: GenerationRequest) -> Completion:
            completion = await self._generate(replace(request, spans=recorded.rest(request.id)))
            recorded.sampled(request.id, len(completion.token_ids))
            return completion

        return (await self._runner.run([prompt], replace(play, generate=generate), self._rubric.score))[0]

    async def _play_one(self, prompt: Prompt, play: Play, versions: tuple[int, int]) -> TrajectoryGroup:
        with ExitStack() as held:
            held.enter_context(self._rollout.hold(versions))

            async def score(group: TrajectoryGroup) -> TrajectoryGroup:
                held.close()  # all answers have ended: a slow reward does not keep a replica from new weights
                return await self._rubric.score(group)

            groups = await self._runner.run([prompt], replace(play, generate=self._within(versions)), score)
        return groups[0]

    @property
    def responds(self) -> bool:
        """Return whether started prompts can end: foreign code may block the event loop."""
        return self._loop.responds

    def complete(self, groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
        """The groups with the scores of reward models in this process."""
        return self._rubric.complete(groups)

    def metrics(self) -> Metrics:
        """Metrics of the rollout engine and the rewards since the last call."""
        return {**self._rollout.metrics(), **self._rubric.metrics()}

    def _within(self, versions: Versions | None) -> GenerateFn:
        """Generate from weights of these versions; None: of any."""
        if versions is None:
            return self._generate
        return lambda request: self._generate(replace(request, versions=versions))

    async def _generate(self, request: GenerationRequest) -> Completion:
        completion = await self._rollout.generate(request)
        self._last_token = time.perf_counter()
        return completion


class RolloutLog:
    """Writes the trajectories that the trackers keep, with their advantages and the actor's log-probs of these only."""

    def __init__(self, tracking: Tracking, per_step: int | None) -> None:
        self._tracking = tracking
        self._per_step = per_step  # None: all of them
        self._chosen: dict[Position, int] = {}  # row of each in the batch
        self._logprobs: dict[Position, list[float]] = {}

    def infer(self, step: int, played: Sequence[TrajectoryGroup], batch: Batch | None, actor: TrainHandle) -> None:
        """Compute the log-probs of a step's trajectories; `batch` holds those that are trained on, if any.

        Call it before the update, so that the actor still has the weights that sampled.
        """
        packed = _packed_positions(played)
        kept = places_to_keep(played, self._per_step, step)
        self._chosen, self._logprobs = {one: packed[one] for one in kept if one in packed}, {}
        if self._chosen and batch is not None:
            part = select(batch, list(self._chosen.values()))
            found = actor.infer_batch(part).logprobs
            assert found is not None  # an actor is a language model
            split = found.split(part.lengths.tolist())
            self._logprobs = {position: one.tolist() for position, one in zip(self._chosen, split, strict=True)}

    def write(self, step: int, played: Sequence[TrajectoryGroup], batch: Batch | None) -> None:
        """Write the trajectories, dropped groups included; `batch` has advantages."""
        known = None if batch is None or batch.advantages is None else batch.advantages.split(batch.lengths.tolist())
        of = {
            p: OfTrainer(self._logprobs.get(p), known[i].tolist() if known else None) for p, i in self._chosen.items()
        }
        self._tracking.rollouts(step, played, of)


def _packed_positions(played: Sequence[TrajectoryGroup]) -> dict[Position, int]:
    """Row of each trainable trajectory in the packed batch; `pack` keeps their order."""
    trainable = [
        (i, j) for i, group in enumerate(played) for j, one in enumerate(group.trajectories) if one.status.trainable
    ]
    return {position: row for row, position in enumerate(trainable)}
