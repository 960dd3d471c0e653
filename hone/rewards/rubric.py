"""A rubric: the reward of a trajectory is the weighted sum of named components (functions and reward models).

Rewards that the environment gave for turns are added, as the component `environment`.

    score(group)      functions and served reward models, while other episodes are still running
    complete(groups)  colocated reward models, once for everything that was collected

Between the two calls the reward of a trajectory is NaN, so that nothing can train on it.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hone.config import ConfigError
from hone.rewards.hosting.processes import functions
from hone.rewards.model import Answer, RewardModels
from hone.rewards.pool import Outcome, RewardPool, encode_case, submit_all
from hone.rewards.settings import ENVIRONMENT, RewardConfig
from hone.types import Metric, Metrics, Prompt, Status, Trajectory, TrajectoryGroup, merge_metrics

NO_MODELS = RewardModels()


class Rubric:
    """Scores groups. If a component fails, its trajectory becomes `reward_failed` and the run continues.

    `start`, `score` and `close` may run on different event loops, because the pool's threads own the processes.
    """

    def __init__(
        self, config: RewardConfig, models: RewardModels = NO_MODELS, logs: Path | None = None, optional: bool = False
    ) -> None:
        """`logs`: folder for what the functions print. `optional`: without any component, an answer is worth 0.

        Raises ConfigError for a component whose reward model is not in `models`.
        """
        self._optional = optional
        self._weights = {name: part.weight for name, part in config.components.items()}
        hosting = functions(config, logs)
        self._functions = tuple(hosting.components)
        self._pool = RewardPool(hosting) if self._functions else None
        self._served = models.served
        self._colocated = models.colocated
        missing = sorted(self._weights.keys() - {*self._functions, *self._served, *self._colocated})
        if missing:
            raise ConfigError(f"reward.components.{missing[0]}.model: this command runs reward functions only")
        self._lock = threading.Lock()
        self._metrics: Metrics = {}
        self._restarts_told = 0

    async def start(self) -> None:
        """Start the processes. Raises ConfigError if a reward cannot be loaded or does not accept its options."""
        await asyncio.gather(*(asyncio.to_thread(one.start) for one in self._processes))

    def check(self, prompts: Sequence[Prompt], key: str) -> None:
        """Raise ConfigError for the first prompt without the ground truth that a function needs. Call it after `start`.

        `key` is where the settings of the prompts' data stand in the run file.
        """
        needing = self._pool.needs_ground_truth if self._pool is not None else ()
        without = next((prompt for prompt in prompts if prompt.ground_truth is None), None)
        if needing and without is not None:
            raise ConfigError(
                f"reward.components.{needing[0]}: its function needs ground_truth, but prompt {without.prompt_id} has "
                f"none (columns: {', '.join(without.row) or 'no others'}); set {key}.columns.ground_truth to the "
                f"column that has it, or {key}.ground_truth_template"
            )

    async def score(self, group: TrajectoryGroup) -> TrajectoryGroup:
        """Return the group with rewards and components; trajectories that had already failed are unchanged.

        With colocated reward models the rewards are NaN until `complete`.
        """
        began = time.perf_counter()
        try:
            case = encode_case(group.prompt.ground_truth, _row(group.prompt))
        except TypeError as error:
            self._note({"reward/failed": Metric.sum(len(group.trainable))})
            return TrajectoryGroup(group.prompt, tuple(_fail(t, str(error)) for t in group.trajectories))
        outcomes = iter(await self._outcomes(group.prompt, group.trainable, case))
        scored = [self._judged(one, next(outcomes)) if one.status.trainable else one for one in group.trajectories]
        self._note({"perf/reward_group_seconds": Metric.mean(time.perf_counter() - began)})
        return TrajectoryGroup(group.prompt, tuple(scored))

    @property
    def has_colocated(self) -> bool:
        """Return whether rewards are complete only after `complete`."""
        return bool(self._colocated)

    def complete(self, groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
        """Add the scores of the colocated reward models, which score the answers of all groups together."""
        if not self._colocated:
            return list(groups)
        members = [_members(group) for group in groups]
        waiting = [
            (group.prompt, one)
            for group, found in zip(groups, members, strict=True)
            for one in found
            if one.status.trainable
        ]
        outcomes: list[dict[str, Outcome]] = [{} for _ in waiting]
        answers = [Answer.of(prompt, one) for prompt, one in waiting]
        for name, ask in self._colocated.items():
            for known, outcome in zip(outcomes, ask(answers) if answers else [], strict=True):
                known[name] = outcome
        judged = iter([self._judged(one, new) for (_, one), new in zip(waiting, outcomes, strict=True)])
        return [
            _with_members(group, [next(judged) if one.status.trainable else one for one in found])
            for group, found in zip(groups, members, strict=True)
        ]

    async def close(self) -> None:
        """End the processes; scores that are still awaited raise PoolClosed."""
        await asyncio.gather(*(asyncio.to_thread(one.close) for one in self._processes))

    def metrics(self) -> Metrics:
        """Counts and times of the step that ends now, under `reward/`."""
        if self._pool is not None:
            self._pool.end_step()
        with self._lock:
            counts: Metrics = {name: Metric.sum(0.0) for name in ("reward/scored", "reward/failed", "reward/timeouts")}
            restarts = sum(one.restarts for one in self._processes)
            counts["reward/worker_restarts"] = Metric.sum(float(restarts - self._restarts_told))
            self._restarts_told = restarts
            told, self._metrics = merge_metrics(counts, self._metrics), {}
        return told

    @property
    def _processes(self) -> list[Any]:
        """All pools of processes: one for the functions, and one per served model."""
        return [*([self._pool] if self._pool is not None else []), *self._served.values()]

    async def _outcomes(self, prompt: Prompt, answers: Sequence[Trajectory], case: str) -> list[dict[str, Outcome]]:
        """Return the outcomes of functions and served models for each answer to a prompt, by component."""
        calls = submit_all(self._pool, answers, case) if self._pool is not None else []
        for name, model in self._served.items():
            calls += [(name, (i,), model.submit(Answer.of(prompt, one))) for i, one in enumerate(answers)]
        ended = await asyncio.gather(*(asyncio.wrap_future(future) for _, _, future in calls))
        found: list[dict[str, Outcome]] = [{} for _ in answers]
        for (name, places, _), outcome in zip(calls, ended, strict=True):
            for place, one in zip(places, outcome.of_each(len(places)), strict=True):
                found[place][name] = one
        if ended:
            seconds = [outcome.seconds for outcome in ended]
            self._note(
                {
                    "reward/timeouts": Metric.sum(sum(outcome.late for outcome in ended)),
                    "perf/reward_call_seconds": Metric.mean(sum(seconds) / len(seconds), len(seconds)),
                    "perf/reward_call_max_seconds": Metric.max(max(seconds)),
                }
            )
        return found

    def _judged(self, trajectory: Trajectory, outcomes: Mapping[str, Outcome]) -> Trajectory:
        """The trajectory with these outcomes; it is counted when its last outcome is there."""
        judged = self._combine(trajectory, outcomes)
        if judged.status is Status.REWARD_FAILED:
            self._note({"reward/failed": Metric.sum(1)})
        elif not math.isnan(judged.reward):
            self._note({"reward/scored": Metric.sum(1)})
        return judged

    def _combine(self, trajectory: Trajectory, outcomes: Mapping[str, Outcome]) -> Trajectory:
        errors = [f"{name}: {outcome.error}" for name, outcome in outcomes.items() if outcome.error]
        fresh = flatten({name: outcome for name, outcome in outcomes.items() if not outcome.error})
        components = {**trajectory.components, **fresh}
        if printed := {name: outcome.printed for name, outcome in outcomes.items() if outcome.printed}:
            trajectory = trajectory.with_(printed={**trajectory.printed, **printed})
        if not errors and not self._weights.keys() <= components.keys():
            return trajectory.with_(reward=math.nan, components=components)  # a colocated model has not scored it yet
        reward = math.nan if errors else sum(weight * components[name] for name, weight in self._weights.items())
        if any(span.reward is not None for span in trajectory.spans):
            components[ENVIRONMENT] = trajectory.turn_reward
            reward += trajectory.turn_reward
        elif not self._weights and not self._optional:
            errors = ["reward.components is empty, and the environment gave no reward"]
        if not errors and not math.isfinite(reward):
            errors = [f"the weighted sum of the components is {reward}"]
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


def _members(group: TrajectoryGroup) -> list[Trajectory]:
    return [*group.trajectories, *([group.greedy] if group.greedy is not None else [])]


def _with_members(group: TrajectoryGroup, members: Sequence[Trajectory]) -> TrajectoryGroup:
    size = len(group.trajectories)
    greedy = members[size] if group.greedy is not None else None
    return replace(group, trajectories=tuple(members[:size]), greedy=greedy)


def _fail(trajectory: Trajectory, error: str) -> Trajectory:
    if not trajectory.status.trainable:
        return trajectory
    return trajectory.with_(status=Status.REWARD_FAILED, error=error)


def _row(prompt: Prompt) -> dict[str, Any]:
    """The row of the data set, with the columns that rendering removed."""
    known = {"messages": prompt.messages, "data_source": prompt.data_source, "prompt_id": prompt.prompt_id}
    return {**known, **prompt.row}
