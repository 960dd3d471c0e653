"""Run episodes: an environment and a `GenerateFn` take turns, and the result is a trajectory.

    prompt --(n samples)--> run_episode: env.start -> [generate -> env.step -> append]* -> Trajectory
                                                     all samples of a prompt done -> score(group) -> TrajectoryGroup

`Play.greedy` adds one greedily decoded episode per prompt, which is scored as a group of its own.
`EpisodeRunner.run` starts every sample of every prompt at once, in order, on one event loop. Each episode has the
deadline `timeout_s`, whose clock stands still while a request waits for a seat at the rollout; a late one is cancelled
and marked `engine_failed` (it was waiting for tokens) or `env_failed` (it was waiting for the environment). Seeds
depend only on (run seed, step, draw, sample, turn), so results do not depend on scheduling. Tokens are only appended.
Who is blamed for what ends an episode: `hone.envs.base`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from hone.data.messages import Tools
from hone.data.routes import Routes, joined_routes
from hone.deadline import Deadline
from hone.envs.base import NOT_FOREIGN, Env, EnvFactory, StepResult, is_single_turn
from hone.envs.settings import EpisodeConfig
from hone.envs.text_codec import TextCodec
from hone.envs.tool_calls import Said
from hone.types import (
    Completion,
    GenerateFn,
    GenerationRequest,
    Metric,
    Metrics,
    Prompt,
    PromptTooLong,
    SamplingParams,
    Status,
    StopReason,
    Trajectory,
    TrajectoryGroup,
    TurnSpan,
    merge_metrics,
)

LOG = logging.getLogger(__name__)

ScoreFn = Callable[[TrajectoryGroup], Awaitable[TrajectoryGroup]]
R = TypeVar("R")


def request_seed(run_seed: int, step: int, draw: int, sample: int, turn: int) -> int:
    """A 63-bit seed for one request, independent of when and where the request runs.

    >>> request_seed(0, 1, 2, 3, 0) == request_seed(0, 1, 2, 3, 0) != request_seed(0, 1, 2, 4, 0)
    True
    """
    text = f"{run_seed}/{step}/{draw}/{sample}/{turn}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


@dataclass(slots=True)
class _Record:
    """A trajectory in progress: four append-only lists of equal length."""

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: Routes | None = None
    prompt_length: int = 0
    response: str = ""
    answer: str | None = None  # what the environment gives the rewards to judge
    spans: list[TurnSpan] = field(default_factory=list)
    anchor: str = ""
    tools: Tools = ()
    metrics: Metrics = field(default_factory=dict)
    stop_reason: StopReason = StopReason.STOP
    waiting_for: str = "the environment"

    def observe(self, ids: Sequence[int]) -> None:
        self.token_ids += ids
        self.loss_mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)

    def sampled(self, completion: Completion, text: str) -> None:
        start = len(self.token_ids)
        self.spans.append(TurnSpan(start, start + len(completion.token_ids), anchor=self.anchor))
        self.token_ids += completion.token_ids
        self.loss_mask += [1] * len(completion.token_ids)
        self.logprobs += completion.logprobs
        self.versions += completion.weight_versions
        if completion.routed_experts is not None:
            self.routes = joined_routes(self.routes, completion.routed_experts)
        self.response += text
        self.stop_reason = completion.stop_reason

    def stepped(self, result: StepResult) -> str:
        """Note what the environment said of the last turn; returns what is wrong with it."""
        self.spans[-1] = replace(self.spans[-1], reward=result.reward, calls=result.calls)
        self.anchor = result.anchor
        self.answer = self.answer if result.answer is None else result.answer
        wrong = [f"{name}={one!r:.80}" for name, one in result.metrics.items() if not isinstance(one, Metric)]
        self.metrics = merge_metrics(self.metrics, {} if wrong else dict(result.metrics))
        return f"StepResult.metrics should be Metric.mean(...) and the like, found {wrong[0]}" if wrong else ""

    def refused(self, prompt: Prompt, error: ValueError) -> tuple[Status, str]:
        """Return the end of a trajectory whose request was refused: truncated if it was too long, else a failure."""
        too_long = self.spans and isinstance(error, PromptTooLong)
        return self.full() if too_long else Status.ENGINE_FAILED, f"{prompt.prompt_id}: {error}"

    def full(self) -> Status:
        """End with the last answer: there is no room for another, so nobody reads what came after it."""
        end = self.spans[-1].end if self.spans else self.prompt_length
        for values in (self.token_ids, self.loss_mask, self.logprobs, self.versions):
            del values[end:]
        self.stop_reason = StopReason.LENGTH
        return Status.TRUNCATED

    def finish(self, prompt: Prompt, sample: int, status: Status, error: str = "") -> Trajectory:
        return Trajectory(
            prompt_id=prompt.prompt_id,
            sample=sample,
            token_ids=tuple(self.token_ids),
            prompt_length=self.prompt_length,
            loss_mask=tuple(self.loss_mask),
            rollout_logprobs=tuple(self.logprobs),
            weight_versions=tuple(self.versions),
            response=self.response if self.answer is None else self.answer,
            stop_reason=self.stop_reason,
            status=status,
            error=error,
            episode=sample,
            spans=tuple(self.spans),
            metrics=self.metrics,
            images=prompt.images,
            routed_experts=self.routes,
        )


@dataclass(frozen=True, slots=True)
class Play:
    """Parts that all episodes of one step share: the engine and the sampling parameters."""

    generate: GenerateFn
    sampling: SamplingParams
    seed: int  # of the run
    samples: int  # per prompt
    step: int = 0
    greedy: bool = False  # also run one greedy episode per prompt: `TrajectoryGroup.greedy`

    def at(self, step: int) -> Play:
        """The same play for another step, which has other seeds."""
        return replace(self, step=step)

    @property
    def greedily(self) -> Play:
        """The same play with greedy decoding."""
        return replace(self, sampling=replace(self.sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0))


class EpisodeRunner:
    """Runs groups of episodes, and scores each group as soon as it is complete."""

    def __init__(self, config: EpisodeConfig, make_env: EnvFactory, codec: TextCodec) -> None:
        self._config = config
        self._make_env = make_env
        self._codec = codec
        self._max_turns = 1 if is_single_turn(make_env) else config.max_turns
        self._timeout_s = config.timeout_s
        self._limits = config.limits

    async def run(self, prompts: Sequence[Prompt], play: Play, score: ScoreFn) -> list[TrajectoryGroup]:
        """Run all episodes; return one group per prompt, in order, with `play.samples` scored trajectories each.

        An error of the rollout engine or of the scoring is raised at once.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._run_group(prompt, play, score)) for prompt in prompts]
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from failures
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
        # A separate group: a reward that compares the members of a group must not see the greedy answer.
        scored, alone = await asyncio.gather(score(samples), score(TrajectoryGroup(prompt, greedy)))
        return replace(scored, greedy=alone.trajectories[0])

    async def _run_one(self, prompt: Prompt, sample: int, play: Play) -> Trajectory:
        """Play one episode, and again after a failure of its environment while `retries` lasts."""
        for _ in range(self._limits.retries):
            played = await self._try_one(prompt, sample, play)
            if played.status is not Status.ENV_FAILED:
                return played
        return await self._try_one(prompt, sample, play)

    async def _try_one(self, prompt: Prompt, sample: int, play: Play) -> Trajectory:
        record = _Record()
        try:
            async with Deadline(self._timeout_s) as deadline:
                return await self._play(prompt, sample, play, record)
        except TimeoutError:
            status = Status.ENGINE_FAILED if record.waiting_for == "the rollout engine" else Status.ENV_FAILED
            message = f"{prompt.prompt_id}: not finished after {self._timeout_s:g} s, waiting for {record.waiting_for}"
            late = record.finish(prompt, sample, status, message)
            return late.with_(unfinished_tokens=deadline.unfinished_tokens)

    async def _play(self, prompt: Prompt, sample: int, play: Play, record: _Record) -> Trajectory:
        env = self._make_env(prompt, sample, self._config)
        try:
            start, failure = await _attempt(env.start())
            if start is None:
                return record.finish(prompt, sample, Status.ENV_FAILED, failure)
            first = self._codec.opening(start, prompt) if start.messages else start.token_ids
            record.observe(first)
            record.prompt_length = len(first)
            record.anchor = start.anchor
            record.tools = start.tools
            return record.finish(prompt, sample, *await self._turns(env, prompt, sample, play, record))
        finally:
            _, failure = await _attempt(env.close())
            if failure:  # the trajectory is kept; a sandbox that leaks is reported
                LOG.warning("%s: the environment did not close: %s", prompt.prompt_id, failure)

    async def _turns(self, env: Env, prompt: Prompt, sample: int, play: Play, record: _Record) -> tuple[Status, str]:
        """Take turns until the episode ends; return its status and error."""
        limits, budget = self._limits, play.sampling.max_tokens
        for turn in range(self._max_turns):
            left = min(budget, (limits.max_episode_tokens or math.inf) - len(record.token_ids))
            if left < 1:
                return record.full(), ""
            room = int(min(left, limits.max_turn_tokens or left))
            try:
                completion = await self._generate(prompt, sample, turn, play, record, room)
            except ValueError as error:  # this request cannot be served (a prompt beyond the context); others can
                return record.refused(prompt, error)
            sampled = len(completion.token_ids)
            budget -= sampled
            text = self._codec.answer(completion.token_ids)
            record.sampled(completion, text)
            plain = not record.tools and "think>" not in text
            said = Said(text) if plain else self._codec.said(completion, text, record.tools)
            if completion.stop_reason is StopReason.ABORTED:
                return Status.ENGINE_FAILED, "aborted by the rollout engine"
            result, failure = await _attempt(env.step(said, completion))
            if result is None or (failure := record.stepped(result)):
                return Status.ENV_FAILED, failure
            full = completion.stop_reason is StopReason.LENGTH and (sampled < room or room == left)
            if result.done or full or result.status is not Status.OK:
                return _ending(result, completion)
            if not result.messages:
                return Status.ENV_FAILED, "the environment is not done, but has no message for the policy"
            if turn + 1 < self._max_turns and budget > 0:
                longest = limits.max_observation_tokens
                record.observe(self._codec.continuation(record.token_ids, result.messages, record.tools, longest))
        return Status.TRUNCATED, ""

    async def _generate(
        self, prompt: Prompt, sample: int, turn: int, play: Play, record: _Record, room: int
    ) -> Completion:
        seed = request_seed(play.seed, play.step, prompt.draw, sample, turn)
        sampling = replace(play.sampling, seed=seed, max_tokens=room, keep_kv=self._max_turns > 1)
        record.waiting_for = "the rollout engine"
        name = f"{play.step}/{prompt.draw}/{sample}/{turn}"
        completion = await play.generate(GenerationRequest(name, tuple(record.token_ids), sampling, prompt.images))
        record.waiting_for = "the environment"
        return completion


def _ending(result: StepResult, completion: Completion) -> tuple[Status, str]:
    if result.status.trainable and completion.stop_reason is StopReason.LENGTH:
        return Status.TRUNCATED, ""
    return result.status, result.error


async def _attempt(call: Awaitable[R]) -> tuple[R | None, str]:
    """Call an environment; return its result, or the reason of its failure: foreign code may raise anything."""
    try:
        return await call, ""
    except NOT_FOREIGN:
        raise
    except BaseException as error:  # noqa: BLE001  reported as the trajectory's status and error
        return None, f"{type(error).__name__}: {error}"


def first_failure(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first exception in nested groups, which is the useful one for a person."""
    first = failures.exceptions[0]
    return first_failure(first) if isinstance(first, BaseExceptionGroup) else first
