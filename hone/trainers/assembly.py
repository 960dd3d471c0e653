"""Wires a run: settings in, a trainer whose parts fit each other out. The only place that knows all the parts.

model folder --+--> actor (train worker) ----.
               +--> reference, critic -------+--> PolicyTrainer
               +--> rollout engine ----------|
data --> prompt stream -----------------------|
rewards --> rubric --> player ---------------'
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hone.algorithms.algorithm import Algorithm
from hone.algorithms.objective import SftObjective
from hone.config import ConfigError, count_as_read
from hone.data.packing import Sample
from hone.data.rendering import Renderer
from hone.data.settings import DatasetConfig
from hone.data.stream import PromptStream, SampleStream, read_prompts, read_samples
from hone.envs import ENVS
from hone.envs.episode import EpisodeRunner, Play, Speech
from hone.models.loading import load_language_model
from hone.models.settings import ModelConfig
from hone.models.tokenizer import load_tokenizer
from hone.rewards.rubric import Rubric
from hone.rollout.settings import SamplingConfig
from hone.runtime import RUNTIMES
from hone.runtime.settings import RuntimeConfig
from hone.trainers.base import Place
from hone.trainers.evaluation import EvaluationSet, Evaluator
from hone.trainers.gallery import Gallery
from hone.trainers.loop import EventLoop
from hone.trainers.playing import Player
from hone.trainers.policy import PolicyParts, PolicyTrainer
from hone.trainers.recorder import Recorder
from hone.trainers.settings import PolicyRunConfig, SupervisedRunConfig
from hone.trainers.supervised import SupervisedParts, SupervisedTrainer
from hone.types import SamplingParams
from hone.workers.handles import RolloutHandle, TrainHandle
from hone.workers.rollout import served_dtype, start_rollout
from hone.workers.train import TrainSpec, TrainWorker


def local_model(model: ModelConfig, folder: Path) -> ModelConfig:
    """A model that lies in a folder: one that is built on the spot is written to `folder` first, tokenizer included."""
    if model.build is None:
        return model
    if (folder / "config.json").is_file():
        count_as_read(model.build)
    else:
        partial = folder.with_name(f".{folder.name}.partial")
        load_language_model(model).save_pretrained(partial)
        load_tokenizer(model).save_pretrained(partial)
        partial.rename(folder)
    return ModelConfig(path=str(folder), dtype=model.dtype)


def place_role(role: str, spec: TrainSpec, runtime: RuntimeConfig, recorder: Recorder) -> TrainHandle:
    """One model on the devices of the run, ready to be trained or asked."""
    group = RUNTIMES.get(runtime.backend.name)(role, TrainWorker(spec), recorder.phase)
    handle = TrainHandle(group, recorder.record)
    handle.initialize()
    return handle


def prepare_process(runtime: RuntimeConfig) -> None:
    """Threads and determinism of this process."""
    torch.set_num_threads(runtime.threads or len(os.sched_getaffinity(0)))
    if runtime.deterministic:
        torch.use_deterministic_algorithms(True)


@dataclass(frozen=True, slots=True)
class Language:
    """The tokenizer's side of a run: messages to tokens, tokens to text, and which tokens end an answer."""

    renderer: Renderer

    @property
    def speech(self) -> Speech:
        return Speech(self.renderer.decode, self.renderer.render_continuation)

    def sampling(self, config: SamplingConfig) -> SamplingParams:
        return replace(config.params(seed=0), stop_token_ids=tuple(sorted(self.renderer.end_token_ids)))


class PolicyAssembly:
    """Builds a policy run part by part; each method makes one, and `trainer` puts them together."""

    def __init__(self, config: PolicyRunConfig, model: ModelConfig, language: Language, place: Place) -> None:
        self._config = config
        self._model = model
        self._language = language
        self._place = place
        self._recorder = place.recorder
        self.loop = EventLoop()
        self.rubric = Rubric(config.reward)

    def trainer(self) -> PolicyTrainer:
        """The trainer, with weight version 0 served and the rewards loaded. Raises ConfigError if parts do not fit."""
        config = self._config
        algorithm = self._algorithm()
        self._require_fields(algorithm)
        self.loop.run(self.rubric.start())
        rollout = self._rollout()
        player = self._player(rollout)
        sampling = self._language.sampling(config.rollout.sampling)
        play = Play(rollout.generate, sampling, config.run.seed, config.update.samples_per_prompt)
        actor = self._actor()
        rollout.sync_from(actor, version=0)
        per_step = config.tracking.rollouts_per_step
        parts = PolicyParts(
            prompts=PromptStream(config.data, self._language.renderer, config.run.seed),
            player=player,
            play=play,
            rollout=rollout,
            algorithm=algorithm,
            actor=actor,
            critic=self._critic() if algorithm.needs_values else None,
            reference=self._reference() if algorithm.needs_reference else None,
            evaluator=self._evaluator(player, play),
            gallery=Gallery(self._place.tracking, None if per_step == "all" else per_step),
        )
        return PolicyTrainer(config, parts, self._place)

    def close(self) -> None:
        self.loop.run(self.rubric.close())
        self.loop.close()

    # --------------------------------------------------------------------------------------------------- the parts

    def _algorithm(self) -> Algorithm:
        update = self._config.update
        return Algorithm(
            self._config.algorithm,
            steps_per_batch=update.minibatches * update.epochs,
            max_response_tokens=self._config.rollout.sampling.max_response_tokens,
        )

    def _require_fields(self, algorithm: Algorithm) -> None:
        """Raise ConfigError if the algorithm reads something that no part of this run produces."""
        config = self._config
        produced = {"rewards", "rollout_logprobs", "old_logprobs", "ref_logprobs", "values"}
        produced |= {f"components.{name}" for name in config.reward.components}
        missing = sorted(algorithm.required_fields - produced)
        if missing:
            raise ConfigError(
                f"algorithm {algorithm.name}: needs {', '.join(missing)}, which no part of this run produces "
                f"(there is: {', '.join(sorted(produced))})"
            )
        if config.critic is not None and not algorithm.needs_values:
            raise ConfigError(
                f"critic: algorithm.advantage {config.algorithm.advantage.name} uses no critic; remove it"
            )
        if config.reference is not None and not algorithm.needs_reference:
            raise ConfigError(
                "reference: algorithm.kl.coef is 0, so no reference is used; remove one, or set the other"
            )

    def _optimizer_steps(self) -> int:
        return self._config.run.steps * self._config.update.minibatches * self._config.update.epochs

    def _actor(self) -> TrainHandle:
        steps = self._optimizer_steps()
        spec = TrainSpec(self._model, self._config.actor, temperature=self._temperature, total_steps=steps)
        return place_role("actor", spec, self._config.runtime, self._recorder)

    def _reference(self) -> TrainHandle:
        spec = TrainSpec(self._config.reference or self._model, self._config.actor, temperature=self._temperature)
        return place_role("reference", spec, self._config.runtime, self._recorder)

    def _critic(self) -> TrainHandle:
        critic = self._config.critic
        if critic is None:
            name = self._config.algorithm.advantage.name
            raise ConfigError(f"critic: algorithm.advantage {name} needs a critic; add the section `critic: {{}}`")
        spec = TrainSpec(critic.model or self._model, critic.engine, "value_model", total_steps=self._optimizer_steps())
        return place_role("critic", spec, self._config.runtime, self._recorder)

    @property
    def _temperature(self) -> float:
        return self._config.rollout.sampling.temperature or 1.0

    def _rollout(self) -> RolloutHandle:
        config = self._config
        tokenizer = self._language.renderer.tokenizer
        engine = start_rollout(config.rollout.engine, self._model, config.actor.compute_dtype, tokenizer)
        return RolloutHandle(engine, served_dtype(engine), self.loop.run)

    def _player(self, rollout: RolloutHandle) -> Player:
        make_env = ENVS.get(self._config.episode.env.name)
        runner = EpisodeRunner(self._config.episode, make_env, self._language.speech)
        return Player(runner, rollout, self.rubric, self.loop, self._recorder)

    def _evaluator(self, player: Player, play: Play) -> Evaluator:
        config = self._config.evaluation
        sets = [self._evaluation_set(name, one) for name, one in config.sets.items()]
        sampling = replace(play.sampling, temperature=config.temperature, top_k=0, top_p=1.0, min_p=0.0)
        # Its own seed: an evaluation must not replay the random numbers of a training step.
        play = replace(play, sampling=sampling, samples=config.samples, seed=self._config.run.seed + 1_000_003)
        return Evaluator(config, sets, player, play, self._place.tracking)

    def _evaluation_set(self, name: str, config: DatasetConfig) -> EvaluationSet:
        prompts, dropped = read_prompts(name, config, self._language.renderer, f"evaluation.sets.{name}")
        if dropped:
            self._place.tracking.message(f"evaluation set {name}: {dropped} prompts are too long and were dropped")
        return EvaluationSet(name, tuple(prompts))


def assemble_supervised(
    config: SupervisedRunConfig, model: ModelConfig, language: Language, place: Place
) -> SupervisedTrainer:
    """A supervised trainer with its model loaded and its data opened."""
    spec = TrainSpec(model, config.engine, total_steps=config.run.steps)
    parts = SupervisedParts(
        samples=SampleStream(config.data, language.renderer, config.run.seed),
        model=place_role("model", spec, config.runtime, place.recorder),
        loss=SftObjective(),
        aggregation=config.aggregation,
        held_out=_held_out(config.evaluation_sets, language.renderer),
        samples_per_step=config.samples_per_step,
        evaluate_every=config.evaluation_every_steps,
    )
    return SupervisedTrainer(config.run.steps, config.checkpoint, parts, place)


def _held_out(sets: Mapping[str, DatasetConfig], renderer: Renderer) -> dict[str, Sequence[Sample]]:
    return {name: read_samples(name, one, renderer, f"evaluation_sets.{name}")[0] for name, one in sets.items()}
