"""A rubric: the reward of a trajectory as the weighted sum of named components, judged in processes of their own."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Mapping
from typing import Any

from hone.rewards.pool import Outcome, RewardPool, encode_case
from hone.rewards.settings import RewardConfig
from hone.types import Metric, Metrics, Prompt, Status, Trajectory, TrajectoryGroup, merge_metrics


class Rubric:
    """Scores groups. A component that fails makes its trajectory `reward_failed`; the run goes on.

    `start`, `score` and `close` may be awaited on different event loops: the processes belong to threads of the pool.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._weights = {name: part.weight for name, part in config.components.items()}
        self._pool = RewardPool(config)
        self._lock = threading.Lock()
        self._metrics: Metrics = {}
        self._restarts_told = 0

    async def start(self) -> None:
        """Start the processes. Raises ConfigError if a reward cannot be loaded or does not take its options."""
        await asyncio.to_thread(self._pool.start)

    async def score(self, group: TrajectoryGroup) -> TrajectoryGroup:
        """The group with reward and components filled in; trajectories that had already failed are left as they are."""
        began = time.perf_counter()
        try:
            case = encode_case(group.prompt.ground_truth, _row(group.prompt))
        except TypeError as error:
            self._note({"reward/failed": Metric.sum(len(group.trainable))})
            return TrajectoryGroup(group.prompt, tuple(_fail(t, str(error)) for t in group.trajectories))
        scored = await asyncio.gather(*(self._score_one(trajectory, case) for trajectory in group.trajectories))
        self._note({"perf/reward_group_seconds": Metric.mean(time.perf_counter() - began)})
        return TrajectoryGroup(group.prompt, tuple(scored))

    async def close(self) -> None:
        """End the processes; scores still awaited raise PoolClosed."""
        await asyncio.to_thread(self._pool.close)

    def metrics(self) -> Metrics:
        """Counts and times since the last call, under `reward/`."""
        with self._lock:
            counts: Metrics = {name: Metric.sum(0.0) for name in ("reward/scored", "reward/failed", "reward/timeouts")}
            restarts = self._pool.restarts
            counts["reward/worker_restarts"] = Metric.sum(float(restarts - self._restarts_told))
            self._restarts_told = restarts
            told = merge_metrics(counts, self._metrics)
            self._metrics = {}
        return told

    async def _score_one(self, trajectory: Trajectory, case: str) -> Trajectory:
        if not trajectory.status.trainable:
            return trajectory
        futures = [self._pool.submit(name, trajectory.response, case) for name in self._weights]
        answers = await asyncio.gather(*(asyncio.wrap_future(future) for future in futures))
        outcomes = dict(zip(self._weights, answers, strict=True))
        judged = self._combine(trajectory, outcomes)
        failed = judged.status is Status.REWARD_FAILED
        self._note(
            {
                "reward/failed" if failed else "reward/scored": Metric.sum(1),
                "reward/timeouts": Metric.sum(sum(outcome.late for outcome in answers)),
                "perf/reward_call_seconds": Metric.mean(sum(o.seconds for o in answers) / len(answers), len(answers)),
                "perf/reward_call_max_seconds": Metric.max(max(o.seconds for o in answers)),
            }
        )
        return judged

    def _combine(self, trajectory: Trajectory, outcomes: Mapping[str, Outcome]) -> Trajectory:
        errors = [f"{name}: {outcome.error}" for name, outcome in outcomes.items() if outcome.error]
        reward = sum(self._weights[name] * outcome.value for name, outcome in outcomes.items())
        if not errors and not math.isfinite(reward):
            errors = [f"the weighted sum of the components is {reward}"]
        components = flatten({name: outcome for name, outcome in outcomes.items() if not outcome.error})
        if errors:
            return _fail(trajectory, "; ".join(errors)).with_(components=components)
        return trajectory.with_(reward=reward, components=components)

    def _note(self, metrics: Metrics) -> None:
        with self._lock:
            self._metrics = merge_metrics(self._metrics, metrics)


def flatten(outcomes: Mapping[str, Outcome]) -> dict[str, float]:
    """Components and their sub-components by name: {"style": 0.5, "style/length": 0.2}."""
    flat: dict[str, float] = {}
    for name, outcome in outcomes.items():
        flat[name] = outcome.value
        flat.update({f"{name}/{part}": value for part, value in outcome.parts.items()})
    return flat


def _fail(trajectory: Trajectory, error: str) -> Trajectory:
    if not trajectory.status.trainable:
        return trajectory
    return trajectory.with_(status=Status.REWARD_FAILED, error=error)


def _row(prompt: Prompt) -> dict[str, Any]:
    """The row of the data set; what rendering took out of it is put back under its usual name."""
    known = {"messages": prompt.messages, "data_source": prompt.data_source, "prompt_id": prompt.prompt_id}
    return {**known, **prompt.row}
