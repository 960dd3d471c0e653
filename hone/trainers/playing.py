"""Plays prompts through environments, the rollout engine and the rewards, and times who was waited for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hone.envs.episode import EpisodeRunner, Play
from hone.rewards.rubric import Rubric
from hone.trainers.agents import AgentRunner
from hone.trainers.loop import EventLoop
from hone.trainers.recorder import Recorder
from hone.types import Completion, Image, Metric, Metrics, Prompt, SamplingParams, Status, TrajectoryGroup
from hone.workers.handles import RolloutHandle


class Player:
    """Turns prompts into scored groups; training and evaluation share one."""

    def __init__(
        self,
        runner: EpisodeRunner | AgentRunner,
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

    def play(self, prompts: Sequence[Prompt], play: Play) -> list[TrajectoryGroup]:
        """The scored groups of `prompts`, in order. Generation is the time until the last token, reward what is left.

        Reward models in this process are asked once all of it is there.

        Raises whatever ends the rollout engine; a failing reward or environment ends in a trajectory's status.
        """
        with self._recorder.phase("generate"):
            self._last_token = time.perf_counter()  # if nothing is generated, all of it is waiting
            groups = self._loop.run(
                self._runner.run(prompts, replace(play, generate=self._generate), self._rubric.score)
            )
            self._recorder.timer.move(time.perf_counter() - self._last_token, "reward")
        return self._rubric.complete(groups)

    def metrics(self) -> Metrics:
        """What the rollout engine and the rewards count, since the last call."""
        return {**self._rollout.metrics(), **self._rubric.metrics()}

    async def _generate(
        self, request_id: str, token_ids: tuple[int, ...], sampling: SamplingParams, images: tuple[Image, ...] = ()
    ) -> Completion:
        completion = await self._rollout.generate(request_id, token_ids, sampling, images)
        self._last_token = time.perf_counter()
        return completion


def describe_greedy(groups: Sequence[TrajectoryGroup]) -> Metrics:
    """The greedy answers beside the samples, where an algorithm asked for them; those that failed count in nothing."""
    played = [group.greedy for group in groups if group.greedy is not None]
    if not played:
        return {}
    usable = [one for one in played if one.status.trainable]
    metrics: Metrics = {"rollout/greedy_failed": Metric.sum(len(played) - len(usable))}
    if usable:
        rewards, lengths = [one.reward for one in usable], [one.response_length for one in usable]
        metrics["rollout/greedy_reward"] = Metric.mean(sum(rewards) / len(usable), len(usable))
        metrics["rollout/greedy_response_length"] = Metric.mean(sum(lengths) / len(usable), len(usable))
    return metrics


def count_statuses(groups: Sequence[TrajectoryGroup]) -> Metrics:
    """What became of a step's trajectories: how many have each status."""
    counts = Counter(one.status for group in groups for one in group.trajectories)
    return {f"rollout/status/{status}": Metric.sum(counts[status]) for status in Status}


def describe(groups: Sequence[TrajectoryGroup]) -> Metrics:
    """What a step's trajectories look like before any is filtered out: rewards and lengths."""
    every = [one for group in groups for one in group.trajectories]
    usable = [one for one in every if one.status.trainable]
    metrics: Metrics = {"rollout/trajectories": Metric.sum(len(every))}
    if not usable:
        return metrics
    lengths = [one.response_length for one in usable]
    rewards = [one.reward for one in usable]
    count = len(usable)
    metrics |= {
        "reward/mean": Metric.mean(sum(rewards) / count, count),
        "reward/max": Metric.max(max(rewards)),
        "reward/min": Metric.min(min(rewards)),
        "rollout/response_length": Metric.mean(sum(lengths) / count, count),
        "rollout/response_length_max": Metric.max(max(lengths)),
        "rollout/truncated_fraction": Metric.mean(sum(one.status is Status.TRUNCATED for one in usable) / count, count),
        "rollout/zero_variance_fraction": Metric.mean(_zero_variance(groups), len(groups)),
    }
    for name in sorted({name for one in usable for name in one.components}):
        found = [one.components[name] for one in usable if name in one.components]
        metrics[f"reward/{name}"] = Metric.mean(sum(found) / len(found), len(found))
    return metrics


def _zero_variance(groups: Sequence[TrajectoryGroup]) -> float:
    """The share of groups whose members all have one reward: they teach a group-relative estimator nothing."""
    return sum(len({one.reward for one in group.trainable}) <= 1 for group in groups) / len(groups)
