"""The asking half of a run: a rollout engine, environments and rewards; training adds the learning half to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from hone.config import ConfigError
from hone.data.rendering import Renderer
from hone.data.settings import DatasetConfig
from hone.data.stream import read_prompts
from hone.envs import ENVS
from hone.envs.episode import EpisodeRunner, Play, Speech
from hone.envs.settings import AgentSettings
from hone.models.settings import ModelConfig
from hone.models.tokenizer import vocabulary_digest
from hone.rewards.model import RewardModels
from hone.rewards.rubric import Rubric
from hone.rollout.settings import SamplingConfig
from hone.runtime import RUNTIMES, ranks
from hone.runtime.lead import Lead
from hone.runtime.settings import RuntimeConfig
from hone.tracking.hub import Tracking
from hone.trainers.agents import AgentRunner
from hone.trainers.evaluation import EvaluationSet, Evaluator
from hone.trainers.leading import LedPlayer, LedRollout, generates_elsewhere
from hone.trainers.loop import EventLoop
from hone.trainers.playing import Player
from hone.trainers.recorder import Recorder
from hone.trainers.reward_models import place_reward_models
from hone.trainers.settings import PolicyRunConfig
from hone.types import SamplingParams
from hone.workers.handles import RolloutHandle, TrainHandle
from hone.workers.rollout import RolloutSpec, start_rollout
from hone.workers.train import TrainSpec, TrainWorker

R = TypeVar("R")
POLICY = "actor"  # the role that is trained on what it samples
EVALUATION_SEED = 1_000_003  # added to the run's: an evaluation must not replay the random numbers of a training step


@dataclass(frozen=True, slots=True)
class Language:
    """The tokenizer's side of a run: messages to tokens, tokens to text, and which tokens end an answer."""

    renderer: Renderer

    @property
    def speech(self) -> Speech:
        return Speech(self.renderer.decode, self.renderer.render_continuation)

    def sampling(self, config: SamplingConfig) -> SamplingParams:
        return replace(config.params(seed=0), stop_token_ids=tuple(sorted(self.renderer.end_token_ids)))


def place_role(role: str, spec: TrainSpec, runtime: RuntimeConfig, recorder: Recorder) -> TrainHandle:
    """One model on the devices of the run, ready to be trained or asked. Raises ConfigError if its settings clash."""
    if spec.replays_routes and role != POLICY:
        raise ConfigError(
            f"{role}: moe.routing_replay = {spec.engine.routing_replay} is for the policy of a reinforcement-learning "
            "run (actor.moe): nothing else is trained on tokens that it sampled; remove the key"
        )
    try:
        group = RUNTIMES.get(runtime.backend.name).place(role, TrainWorker, spec, runtime, recorder.phase)
    except ValueError as error:
        raise ConfigError(f"{role}: {error}") from error
    handle = TrainHandle(group, recorder.record, spec.replays_routes)
    handle.initialize()
    return handle


class Answering:
    """Prompts in, judged answers out. The engine serves nothing before the first weight sync.

    Constructing starts the reward processes and the rollout's servers, and raises ConfigError for a reward that cannot
    be loaded. Of several ranks the first has all of these; the others hear what it plays.
    """

    def __init__(
        self,
        config: PolicyRunConfig,
        model: ModelConfig,
        language: Language,
        recorder: Recorder,
        beside: Mapping[str, str] | None = None,
    ) -> None:
        """`beside`: LoRA adapters (name -> folder) to be asked beside a policy that is not trained; None: it is."""
        self._language = language
        self._trained = beside is None
        env = config.episode.env
        self._adapters = {**(env.adapters if isinstance(env, AgentSettings) else {}), **(beside or {})}
        self._recorder = recorder
        self._config = config
        self._started: RolloutHandle | None = None
        self._rubric: Rubric | None = None
        self._closing = ExitStack()  # what else ends with it
        self._kept: dict[str, Any] = {}
        self.loop = EventLoop()
        self.lead = Lead()
        models = self._reward_models()  # those on the devices of the run are on every rank
        try:
            player = self._start(model, models) if ranks.is_first() else None
        except BaseException:
            self.close()
            raise
        self.player: Player | LedPlayer
        self.rollout: RolloutHandle | LedRollout
        if player is not None and self._started is not None and ranks.ranks() == 1:
            self.player, self.rollout = player, self._started
        else:
            self.player, self.rollout = LedPlayer(player, self.lead), LedRollout(self._started, self.lead)
        generate = self._started.generate if self._started is not None else generates_elsewhere
        routes = config.actor.routing_replay == "rollout"
        sampling = replace(language.sampling(config.rollout.sampling), routed_experts=routes)
        self.play = Play(generate, sampling, config.run.seed, config.update.samples_per_prompt)

    def _start(self, model: ModelConfig, models: RewardModels) -> Player:
        """Everything that runs beside the trainer."""
        config, language = self._config, self._language
        rubric = self._rubric = Rubric(config.reward, models)
        self.loop.run(rubric.start())
        spec = RolloutSpec(
            settings=config.rollout,
            weights=config.weights,
            model=model,
            compute_dtype=config.actor.compute_dtype,
            tokenizer=language.renderer.tokenizer,
            folder=Path(config.run.dir),
            lora=config.actor.lora,
            adapters=self._adapters,
            trained=self._trained,
            routed_experts=config.actor.routing_replay == "rollout",
            runtime=config.runtime,
        )
        rollout = self._started = start_rollout(spec, self.loop.run, self._recorder.phase)
        env = config.episode.env
        runner: EpisodeRunner | AgentRunner
        if isinstance(env, AgentSettings):
            runner = AgentRunner(config.episode, env, language.renderer)
        else:
            runner = EpisodeRunner(config.episode, ENVS.get(env.name), language.speech)
        return Player(runner, rollout, rubric, self.loop, self._recorder)

    def _reward_models(self) -> RewardModels:
        def role(name: str, spec: TrainSpec) -> TrainHandle:
            return place_role(name, spec, self._config.runtime, self._recorder)

        return place_reward_models(self._config.reward, vocabulary_digest(self._language.renderer.tokenizer), role)

    def evaluator(self, tracking: Tracking, adapter: str = "") -> Evaluator:
        """The held-out sets of the run file, read and rendered; `adapter` answers in place of the policy."""
        config = self._config.evaluation
        sets = [self._evaluation_set(name, one, tracking) for name, one in config.sets.items()]
        plain = replace(self.play.sampling, top_k=0, top_p=1.0, min_p=0.0, routed_experts=False, adapter=adapter)
        sampling = replace(plain, temperature=config.temperature)
        play = replace(self.play, sampling=sampling, samples=config.samples, seed=self.play.seed + EVALUATION_SEED)
        return Evaluator(config, sets, self.player, play, tracking)

    def once(self, name: str, make: Callable[[], R]) -> R:
        """What `make` gives, made at the first call and kept: a run with a warm start is put together twice."""
        if name not in self._kept:
            self._kept[name] = make()
        kept: R = self._kept[name]
        return kept

    def ends(self, close: Callable[[], None]) -> None:
        """Call `close` when this is closed, before its event loop is."""
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

    def _evaluation_set(self, name: str, config: DatasetConfig, tracking: Tracking) -> EvaluationSet:
        prompts, dropped = read_prompts(name, config, self._language.renderer, f"evaluation.sets.{name}")
        if dropped:
            tracking.message(f"evaluation set {name}: {dropped} prompts are too long and were dropped")
        return EvaluationSet(name, tuple(prompts))
