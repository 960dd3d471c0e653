"""Plays episodes: environments on one side, a `GenerateFn` on the other, trajectories out.

    prompt --(n samples)--> run_episode: env.start -> [generate -> env.step -> append]* -> Trajectory
                                                     all samples of a prompt done -> score(group) -> TrajectoryGroup

A play with `greedy` adds one more episode to each prompt, decoded greedily and scored as a group of its own.
`EpisodeRunner.run` submits every sample of every prompt at once, in order, on one event loop. It waits for them with
the deadline `timeout_s` of each; a late episode is cancelled and marked `engine_failed` (it was waiting for tokens) or
`env_failed` (it was waiting for the environment). Seeds come from (run seed, step, draw, sample, turn), so results do
not depend on scheduling.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from hone.data.routes import Routes, joined_routes
from hone.envs.base import Env, EnvFactory, StepResult
from hone.envs.settings import EpisodeConfig
from hone.types import (
    Completion,
    GenerateFn,
    Message,
    Prompt,
    PromptTooLong,
    SamplingParams,
    Status,
    StopReason,
    Trajectory,
    TrajectoryGroup,
)

LOG = logging.getLogger(__name__)

ScoreFn = Callable[[TrajectoryGroup], Awaitable[TrajectoryGroup]]
DecodeFn = Callable[[Sequence[int]], str]
R = TypeVar("R")
ContinueFn = Callable[[tuple[int, ...], Sequence[Message]], Sequence[int]]
"""`(ids so far, new messages) -> ids to append`; never re-encodes what is already there."""


def request_seed(run_seed: int, step: int, draw: int, sample: int, turn: int) -> int:
    """A 63-bit seed for one request, the same whenever and wherever the request runs.

    >>> request_seed(0, 1, 2, 3, 0) == request_seed(0, 1, 2, 3, 0) != request_seed(0, 1, 2, 4, 0)
    True
    """
    text = f"{run_seed}/{step}/{draw}/{sample}/{turn}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


@dataclass(slots=True)
class _Record:
    """A trajectory while it grows: four lists of one length, only ever appended to."""

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: Routes | None = None
    prompt_length: int = 0
    response: str = ""
    turns: int = 0
    stop_reason: StopReason = StopReason.STOP
    waiting_for: str = "the environment"

    def observe(self, ids: Sequence[int]) -> None:
        self.token_ids += ids
        self.loss_mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)

    def sampled(self, completion: Completion, text: str) -> None:
        self.token_ids += completion.token_ids
        self.loss_mask += [1] * len(completion.token_ids)
        self.logprobs += completion.logprobs
        self.versions += completion.weight_versions
        self.routes = joined_routes(self.routes, completion.routed_experts)
        self.response += text
        self.turns += 1
        self.stop_reason = completion.stop_reason

    def refused(self, prompt: Prompt, sample: int, error: ValueError) -> Trajectory:
        """The engine does not serve the next turn: the end of a conversation that outgrew it, or a failure."""
        message = f"{prompt.prompt_id}: {error}"
        if not (self.turns and isinstance(error, PromptTooLong)):
            return self.finish(prompt, sample, Status.ENGINE_FAILED, message)
        self.stop_reason = StopReason.LENGTH
        return self.finish(prompt, sample, Status.TRUNCATED, message)

    def finish(self, prompt: Prompt, sample: int, status: Status, error: str = "") -> Trajectory:
        return Trajectory(
            prompt_id=prompt.prompt_id,
            sample=sample,
            token_ids=tuple(self.token_ids),
            prompt_length=self.prompt_length,
            loss_mask=tuple(self.loss_mask),
            rollout_logprobs=tuple(self.logprobs),
            weight_versions=tuple(self.versions),
            response=self.response,
            stop_reason=self.stop_reason,
            status=status,
            error=error,
            episode=sample,
            turns=self.turns,
            images=prompt.images,
            routed_experts=self.routes,
        )


@dataclass(frozen=True, slots=True)
class Speech:
    """How an episode turns tokens into text and messages into tokens."""

    decode: DecodeFn
    continue_with: ContinueFn


@dataclass(frozen=True, slots=True)
class Play:
    """What all episodes of one step share: who samples, and how."""

    generate: GenerateFn
    sampling: SamplingParams
    seed: int  # of the run
    samples: int  # per prompt
    step: int = 0
    greedy: bool = False  # play one greedy episode beside the samples: `TrajectoryGroup.greedy`

    def at(self, step: int) -> Play:
        """The same play at another step: other seeds."""
        return replace(self, step=step)

    @property
    def greedily(self) -> Play:
        """The same play, decoded greedily."""
        return replace(self, sampling=replace(self.sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0))


class EpisodeRunner:
    """Runs groups of episodes to their end, and scores each group as soon as it is complete."""

    def __init__(self, config: EpisodeConfig, make_env: EnvFactory, speech: Speech) -> None:
        self._make_env = make_env
        self._speech = speech
        self._max_turns = config.max_turns
        self._timeout_s = config.timeout_s

    async def run(self, prompts: Sequence[Prompt], play: Play, score: ScoreFn) -> list[TrajectoryGroup]:
        """The groups of `prompts`, in their order, each with `play.samples` trajectories and their rewards.

        Raises what the rollout engine or the scoring raised, as soon as the first of them does.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._run_group(prompt, play, score)) for prompt in prompts]
        except BaseExceptionGroup as failures:
            raise _first(failures) from failures
        return [task.result() for task in running]

    async def _run_group(self, prompt: Prompt, play: Play, score: ScoreFn) -> TrajectoryGroup:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._run_one(prompt, sample, play)) for sample in range(play.samples)]
            if play.greedy:
                running.append(tasks.create_task(self._run_one(prompt, play.samples, play.greedily)))
        played = tuple(task.result() for task in running)
        samples, greedy = TrajectoryGroup(prompt, played[: play.samples]), played[play.samples :]
        if not greedy:
            return await score(samples)
        # A group of its own: a reward that compares the members of a group must not see it among them.
        scored, alone = await asyncio.gather(score(samples), score(TrajectoryGroup(prompt, greedy)))
        return replace(scored, greedy=alone.trajectories[0])

    async def _run_one(self, prompt: Prompt, sample: int, play: Play) -> Trajectory:
        record = _Record()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._play(prompt, sample, play, record)
        except TimeoutError:
            status = Status.ENGINE_FAILED if record.waiting_for == "the rollout engine" else Status.ENV_FAILED
            message = f"{prompt.prompt_id}: no end after {self._timeout_s:g} s; waited for {record.waiting_for}"
            return record.finish(prompt, sample, status, message)

    async def _play(self, prompt: Prompt, sample: int, play: Play, record: _Record) -> Trajectory:
        env = self._make_env(prompt, sample)
        try:
            first, failure = await _attempt(env.start())
            if first is None:
                return record.finish(prompt, sample, Status.ENV_FAILED, failure)
            record.observe(first)
            record.prompt_length = len(first)
            return await self._turns(env, prompt, sample, play, record)
        finally:
            _, failure = await _attempt(env.close())
            if failure:  # what was played stands; a sandbox that leaks should be heard of
                LOG.warning("%s: the environment did not close: %s", prompt.prompt_id, failure)

    async def _turns(self, env: Env, prompt: Prompt, sample: int, play: Play, record: _Record) -> Trajectory:
        budget = play.sampling.max_tokens
        for turn in range(self._max_turns):
            try:
                completion = await self._generate(prompt, sample, turn, play, record, budget)
            except ValueError as error:  # cannot be served, such as a prompt beyond the context: the others can
                return record.refused(prompt, sample, error)
            budget -= len(completion.token_ids)
            text = self._speech.decode(completion.token_ids)
            record.sampled(completion, text)
            if completion.stop_reason is StopReason.ABORTED:
                return record.finish(prompt, sample, Status.ENGINE_FAILED, "aborted by the rollout engine")
            result, failure = await _attempt(env.step(completion, text))
            if result is None:
                return record.finish(prompt, sample, Status.ENV_FAILED, failure)
            if result.done or completion.stop_reason is StopReason.LENGTH:
                return record.finish(prompt, sample, *_ending(result, completion))
            record.observe(self._speech.continue_with(tuple(record.token_ids), result.messages))
            if budget <= 0:
                break
        return record.finish(prompt, sample, Status.TRUNCATED)

    async def _generate(
        self, prompt: Prompt, sample: int, turn: int, play: Play, record: _Record, budget: int
    ) -> Completion:
        seed = request_seed(play.seed, play.step, prompt.draw, sample, turn)
        sampling = replace(play.sampling, seed=seed, max_tokens=budget)
        record.waiting_for = "the rollout engine"
        request, shown = f"{play.step}/{prompt.draw}/{sample}/{turn}", (prompt.images,) if prompt.images else ()
        completion = await play.generate(request, tuple(record.token_ids), sampling, *shown)
        record.waiting_for = "the environment"
        return completion


def _ending(result: StepResult, completion: Completion) -> tuple[Status, str]:
    if not result.status.trainable:
        return result.status, result.error
    if completion.stop_reason is StopReason.LENGTH:
        return Status.TRUNCATED, ""
    return result.status, result.error


async def _attempt(call: Awaitable[R]) -> tuple[R | None, str]:
    """The result of a call into an environment, or why it failed: foreign code may raise anything."""
    try:
        return await call, ""
    except Exception as error:  # noqa: BLE001  reported as the trajectory's status and error
        return None, f"{type(error).__name__}: {error}"


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first exception of nested groups: the one that a person can do something about."""
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
