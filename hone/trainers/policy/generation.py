"""Generation of a run: rollout engine, environments and rewards. `hone eval` uses it without training."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from hone.config import ConfigError
from hone.data.columns import PromptReader
from hone.data.rendering import Renderer
from hone.data.settings import PromptSetConfig
from hone.data.stream import read_prompts
from hone.envs.episode import Play
from hone.envs.runners import make_runner
from hone.envs.settings import EndpointSettings
from hone.models.settings import ModelConfig
from hone.models.tokenizer import vocabulary_digest
from hone.platforms.base import compute_dtype, current_platform
from hone.processes.descriptors import open_descriptors, raise_limit
from hone.rewards.model import RewardModels
from hone.rewards.rubric import Rubric
from hone.rollout.settings import CONTROLS, RolloutConfig, SamplingConfig
from hone.tracking.hub import Tracking
from hone.trainers.policy.collection import Collector
from hone.trainers.policy.evaluation import EvaluationSet, Evaluator
from hone.trainers.policy.settings import (
    EvaluationSamplingConfig,
    PolicyEvaluationConfig,
    PolicyRunConfig,
    learns_from_teachers,
)
from hone.trainers.reward_models.placement import place_reward_models
from hone.trainers.run.event_loop import EventLoop
from hone.trainers.run.recorder import Recorder
from hone.trainers.run.roles import place_role
from hone.types import Prompt, SamplingParams, TrajectoryGroup
from hone.workers.rollout import NewWeights, RolloutSpec, prepare_rollout
from hone.workers.rollout_role import RolloutHandle
from hone.workers.train import TrainHandle, TrainSpec

R = TypeVar("R")
OnGroup = Callable[[TrajectoryGroup], None]
LOG = logging.getLogger("hone.trainers")
RESERVED_DESCRIPTORS = 256  # for what opens files now and then: checkpoints, logs, weight sync, data sets
EVALUATION_SEED = 1_000_003  # added to the run's: an evaluation must not replay the random numbers of a training step


def sampling_params(renderer: Renderer, config: SamplingConfig) -> SamplingParams:
    """Return the sampling of answers; the tokens that end an answer come from the chat template."""
    return replace(config.params(seed=0), stop_token_ids=tuple(sorted(renderer.end_token_ids)))


def has_servers(rollout: RolloutConfig) -> bool:
    """Return whether a rollout generates in processes of its own."""
    return not (rollout.backend == "builtin" and rollout.builtin.process == "inside")


def within_descriptors(config: PolicyRunConfig) -> RolloutConfig:
    """The rollout's settings, with as many requests at a time as this process may open connections.

    Raises the limit of open files first. Warns, with the count, where a run needs more; ConfigError if nothing is left.
    """
    rollout, limit = config.rollout, raise_limit()
    if not has_servers(rollout):
        return rollout
    episodes = _episodes_at_a_time(config)
    needs = {
        "open now": open_descriptors(),
        "files and weight sync": RESERVED_DESCRIPTORS,
        "reward processes": 4 * config.reward.workers,
        "agents": 2 * episodes if isinstance(config.episode.env, EndpointSettings) else 0,  # client and endpoint
    }
    most = max(1, min(rollout.requests_per_replica, episodes))
    left = (limit - sum(needs.values())) // rollout.replicas - CONTROLS
    if left >= most:
        return rollout
    counted = ", ".join(f"{name} {count:,}" for name, count in needs.items() if count)
    found = (
        f"file descriptors: this run needs {rollout.replicas} x {most + CONTROLS:,} for requests to servers, beside "
        f"{counted}; {limit:,} are allowed. Raise the hard limit (ulimit -Hn)"
    )
    if left < 1:
        raise ConfigError(f"{found}; none is left for requests")
    LOG.warning(
        "%s. Each server gets at most %d requests at a time instead (rollout.requests_per_replica)", found, left
    )
    return rollout.model_copy(update={"requests_per_replica": left})


def _episodes_at_a_time(config: PolicyRunConfig) -> int:
    """Return the number of episodes that may run together, those of prompts drawn ahead included."""
    sampling = config.algorithm.dynamic_sampling
    prompts = config.update.prompts_per_step * (1.0 if sampling is None else sampling.oversample)
    ahead = 0 if config.asynchrony is None else config.asynchrony.staleness * config.update.prompts_per_step
    return (math.ceil(prompts) + ahead) * config.update.samples_per_prompt


def _new_weights(config: PolicyRunConfig) -> NewWeights | None:
    """Return the effect of new weights on answers that are being written; None: there are none then."""
    asynchrony = config.asynchrony
    return asynchrony.new_weights if asynchrony is not None and asynchrony.staleness else None


def agents_adapters(config: PolicyRunConfig) -> Mapping[str, str]:
    """The adapters that agents may ask for by name."""
    env = config.episode.env
    return env.adapters if isinstance(env, EndpointSettings) else {}


def rollout_spec(
    config: PolicyRunConfig, model: ModelConfig, renderer: Renderer, adapters: Mapping[str, str]
) -> RolloutSpec:
    """The rollout of a run that trains its policy."""
    return RolloutSpec(
        settings=config.rollout,
        weights=config.weights,
        model=model,
        compute_dtype=compute_dtype(config.actor.compute_dtype, current_platform()),
        tokenizer=renderer.tokenizer,
        folder=Path(config.run.dir),
        lora=config.actor.lora,
        adapters=adapters,
        routed_experts=config.actor.routing_replay == "rollout",
        runtime=config.runtime,
        new_weights=_new_weights(config),
    )


class _WatchedRubric:
    """A rubric whose scored groups are also given to `on_group`, one by one."""

    def __init__(self, rubric: Rubric, on_group: OnGroup) -> None:
        self._rubric = rubric
        self._on_group = on_group

    async def score(self, group: TrajectoryGroup) -> TrajectoryGroup:
        scored = await self._rubric.score(group)
        if not self._rubric.has_colocated:
            self._on_group(scored)
        return scored

    def complete(self, groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
        completed = self._rubric.complete(groups)
        for group in completed if self._rubric.has_colocated else ():
            self._on_group(group)
        return completed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rubric, name)


class Generation:
    """Generates answers to prompts and scores them. The engine has no weights before the first weight sync.

    Constructing starts the reward processes, and raises ConfigError for a reward that cannot be loaded. `begin`
    constructs the rollout, after the data have been checked. `start` starts the servers, after all else was checked.
    """

    collector: Collector
    rollout: RolloutHandle
    play: Play

    def __init__(
        self,
        config: PolicyRunConfig,
        model: ModelConfig,
        renderer: Renderer,
        recorder: Recorder,
        adapters: Mapping[str, str] | None = None,
        on_group: OnGroup | None = None,
    ) -> None:
        """`adapters`: LoRA adapters (name -> folder) of a policy that is not trained; None: the policy is trained.

        `on_group` is called with each group as soon as it has rewards.
        """
        self._on_group = on_group
        self._renderer = renderer
        self._model = model
        self._trained = adapters is None
        self._adapters = {**agents_adapters(config), **(adapters or {})}
        self._recorder = recorder
        self._config = config
        self._started: RolloutHandle | None = None
        self._rubric: Rubric | None = None
        self._waiting: list[Callable[[], None]] = []  # start servers
        self._closing = ExitStack()  # closed with this
        self._kept: dict[str, Any] = {}
        self.loop = EventLoop()
        models = self._reward_models()
        try:
            self._rubric = Rubric(config.reward, models, self._reward_logs, learns_from_teachers(config))
            self.loop.run(self._rubric.start())
        except BaseException:
            self.close()
            raise

    def begin(self) -> None:
        """Construct the rollout engine, unless it was."""
        if self._started is not None:
            return
        config = self._config
        assert self._rubric is not None
        self.rollout = self._started = self._rollout()
        self._waiting.append(self.rollout.start)
        runner = make_runner(config.episode, self._renderer)
        self._closing.callback(lambda: self.loop.run(runner.close()))
        rubric: Any = self._rubric if self._on_group is None else _WatchedRubric(self._rubric, self._on_group)
        self.collector = Collector(runner, self.rollout, rubric, self.loop, self._recorder)
        routes = config.actor.routing_replay == "rollout"
        sampling = replace(sampling_params(self._renderer, config.rollout.sampling), routed_experts=routes)
        self.play = Play(self.rollout.generate, sampling, config.run.seed, config.update.samples_per_prompt)

    def start(self) -> None:
        """Start the servers that do not run yet. Raises ServerFailed if one does not start."""
        current_platform().empty_cache()  # what models took while they were loaded, a server on this device may need
        while self._waiting:
            self._waiting.pop(0)()

    def _rollout(self) -> RolloutHandle:
        config = self._config
        spec = replace(
            rollout_spec(config, self._model, self._renderer, self._adapters),
            settings=within_descriptors(config),
            trained=self._trained,
            new_weights=_new_weights(config) if self._trained else None,
            lends=self._trained and config.asynchrony is not None and config.asynchrony.lend_trainer,
        )
        return prepare_rollout(spec, self.loop, self._recorder.phase)

    def _reward_models(self) -> RewardModels:
        def role(name: str, spec: TrainSpec) -> TrainHandle:
            return place_role(name, spec, self._config.runtime, self._recorder)

        digest = vocabulary_digest(self._renderer.tokenizer)
        return place_reward_models(self._config.reward, digest, role, self._reward_logs)

    @property
    def _reward_logs(self) -> Path:
        return Path(self._config.run.dir) / "rewards"

    def check_ground_truth(self, prompts: Sequence[Prompt]) -> None:
        """Raise ConfigError if training prompts lack the ground truth that a reward function needs."""
        keys = {"train": "data.train", **{name: f"data.mix.{name}" for name in self._config.data.mix}}
        if self._rubric is not None:
            for name, key in keys.items():
                self._rubric.check([one for one in prompts if one.prompt_id.startswith(f"{name}/")], key)

    def check_sets(self) -> None:
        """Raise ConfigError for a held-out file whose columns or templates do not fit; the answers come later."""
        for name, one in self._config.evaluation.sets.items():
            if one.source is None:
                PromptReader(name, one, f"evaluation.sets.{name}")

    def evaluator(
        self, tracking: Tracking, adapter: str = "", instead: PolicyEvaluationConfig | None = None
    ) -> Evaluator:
        """The held-out sets of the run file, or those `instead` of them, read and rendered.

        `adapter` names a LoRA adapter that answers.
        """
        config = instead or self._config.evaluation
        sets = [self._evaluation_set(name, one, tracking) for name, one in config.sets.items()]
        if not sets:  # their other settings stay unread, so that a run file that sets them is refused
            return Evaluator([], self.collector, self.play, tracking)
        chosen = config.sampling or EvaluationSamplingConfig()
        sampling = replace(
            self.play.sampling,
            temperature=chosen.temperature,
            top_k=chosen.top_k,
            top_p=chosen.top_p,
            min_p=chosen.min_p,
            max_tokens=chosen.max_response_tokens or self.play.sampling.max_tokens,
            routed_experts=False,
            adapter=adapter,
        )
        play = replace(self.play, sampling=sampling, samples=config.samples, seed=self.play.seed + EVALUATION_SEED)
        return Evaluator(sets, self.collector, play, tracking, config)

    def once(self, name: str, make: Callable[[], R]) -> R:
        """The result of `make`, called once and cached, because a run with a warm start is assembled twice."""
        if name not in self._kept:
            self._kept[name] = make()
        kept: R = self._kept[name]
        return kept

    def later(self, start: Callable[[], None], close: Callable[[], None]) -> None:
        """Have `start` called when servers start, and `close` when this is closed, before its event loop is."""
        self._waiting.append(start)
        self._closing.callback(close)

    def close(self) -> None:
        """End the rollout's servers, the reward processes and the event loop."""
        try:
            with self._closing:
                if self._started is not None:
                    self._started.close()
        finally:
            if self._rubric is not None:
                self.loop.run(self._rubric.close())
            self.loop.close()

    def _evaluation_set(self, name: str, config: PromptSetConfig, tracking: Tracking) -> EvaluationSet:
        prompts, dropped = read_prompts(name, config, self._renderer, f"evaluation.sets.{name}")
        if self._rubric is not None:
            self._rubric.check(prompts, f"evaluation.sets.{name}")
        if dropped:
            tracking.message(f"evaluation set {name}: {dropped} prompts are too long and were dropped")
        return EvaluationSet(name, tuple(prompts))
