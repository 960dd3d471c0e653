"""The asking half of a run: a rollout engine, environments and rewards; training adds the learning half to it."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
from hone.runtime import RUNTIMES
from hone.runtime.settings import RuntimeConfig
from hone.trainers.agents import AgentRunner
from hone.trainers.base import Place
from hone.trainers.evaluation import EvaluationSet, Evaluator
from hone.trainers.loop import EventLoop
from hone.trainers.playing import Player
from hone.trainers.recorder import Recorder
from hone.trainers.reward_models import place_reward_models
from hone.trainers.settings import PolicyRunConfig
from hone.types import SamplingParams
from hone.workers.handles import RolloutHandle, TrainHandle
from hone.workers.rollout import RolloutSpec, start_rollout
from hone.workers.train import TrainSpec, TrainWorker

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
    try:
        group = RUNTIMES.get(runtime.backend.name).place(role, TrainWorker, spec, runtime, recorder.phase)
    except ValueError as error:
        raise ConfigError(f"{role}: {error}") from error
    handle = TrainHandle(group, recorder.record)
    handle.initialize()
    return handle


class Answering:
    """Prompts in, judged answers out. The engine serves nothing before the first weight sync.

    Constructing starts the reward processes, and raises ConfigError for a reward that cannot be loaded.
    """

    def __init__(self, config: PolicyRunConfig, model: ModelConfig, language: Language, place: Place) -> None:
        self._language = language
        self._place = place
        self._evaluation = config.evaluation
        self._started: RolloutHandle | None = None
        self.rubric = Rubric(config.reward, self._reward_models(config, place))
        self.loop = EventLoop()
        try:
            self.loop.run(self.rubric.start())
            self._assemble(config, model, language, place)
        except BaseException:
            self.close()
            raise

    def _assemble(self, config: PolicyRunConfig, model: ModelConfig, language: Language, place: Place) -> None:
        spec = RolloutSpec(
            settings=config.rollout,
            weights=config.weights,
            model=model,
            compute_dtype=config.actor.compute_dtype,
            tokenizer=language.renderer.tokenizer,
            folder=place.folder,
        )
        self.rollout = self._started = start_rollout(spec, self.loop.run, place.recorder.phase)
        env = config.episode.env
        runner: EpisodeRunner | AgentRunner
        if isinstance(env, AgentSettings):
            runner = AgentRunner(config.episode, env, language.renderer)
        else:
            runner = EpisodeRunner(config.episode, ENVS.get(env.name), language.speech)
        self.player = Player(runner, self.rollout, self.rubric, self.loop, place.recorder)
        sampling = language.sampling(config.rollout.sampling)
        self.play = Play(self.rollout.generate, sampling, config.run.seed, config.update.samples_per_prompt)

    def _reward_models(self, config: PolicyRunConfig, place: Place) -> RewardModels:
        def role(name: str, spec: TrainSpec) -> TrainHandle:
            return place_role(name, spec, config.runtime, place.recorder)

        return place_reward_models(config.reward, vocabulary_digest(self._language.renderer.tokenizer), role)

    def evaluator(self) -> Evaluator:
        """The held-out sets of the run file, read and rendered."""
        config = self._evaluation
        sets = [self._evaluation_set(name, one) for name, one in config.sets.items()]
        sampling = replace(self.play.sampling, temperature=config.temperature, top_k=0, top_p=1.0, min_p=0.0)
        play = replace(self.play, sampling=sampling, samples=config.samples, seed=self.play.seed + EVALUATION_SEED)
        return Evaluator(config, sets, self.player, play, self._place.tracking)

    def close(self) -> None:
        """End the rollout's servers, the reward processes and the event loop."""
        try:
            if self._started is not None:
                self._started.close()
        finally:
            self.loop.run(self.rubric.close())
            self.loop.close()

    def _evaluation_set(self, name: str, config: DatasetConfig) -> EvaluationSet:
        prompts, dropped = read_prompts(name, config, self._language.renderer, f"evaluation.sets.{name}")
        if dropped:
            self._place.tracking.message(f"evaluation set {name}: {dropped} prompts are too long and were dropped")
        return EvaluationSet(name, tuple(prompts))
