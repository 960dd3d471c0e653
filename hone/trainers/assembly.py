"""Wires a run: settings in, a trainer whose parts fit each other out. The only place that knows all the parts.

model folder --+--> actor, critic, reference (train workers) --.
               +--> answering (rollout engine, rewards) -------+--> PolicyTrainer
data ------------> prompt stream ------------------------------'
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from hone.algorithms.algorithm import Algorithm
from hone.algorithms.objective import SftObjective
from hone.config import ConfigError, count_as_read
from hone.data.packing import Sample
from hone.data.settings import DatasetConfig
from hone.data.stream import PromptStream, SampleStream, read_samples
from hone.models.loading import load_language_model, without_progress_bars
from hone.models.settings import ModelConfig
from hone.models.tokenizer import load_tokenizer
from hone.runtime.settings import RuntimeConfig
from hone.trainers.answering import Answering, Language, place_role
from hone.trainers.base import Place
from hone.trainers.gallery import Gallery
from hone.trainers.policy import PolicyParts, PolicyTrainer
from hone.trainers.settings import PolicyRunConfig, SupervisedRunConfig
from hone.trainers.supervised import SupervisedParts, SupervisedTrainer
from hone.workers.handles import TrainHandle
from hone.workers.train import TrainSpec


def local_model(model: ModelConfig, folder: Path) -> ModelConfig:
    """A model that lies in a folder: one that is built on the spot is written to `folder` first, tokenizer included."""
    if model.build is None:
        return model
    if (folder / "config.json").is_file():
        count_as_read(model.build)
    else:
        partial = folder.with_name(f".{folder.name}.partial")
        with without_progress_bars():
            load_language_model(model).save_pretrained(partial)
        load_tokenizer(model).save_pretrained(partial)
        partial.rename(folder)
    return ModelConfig(path=str(folder), dtype=model.dtype)


def prepare_process(runtime: RuntimeConfig) -> None:
    """Threads and determinism of this process."""
    torch.set_num_threads(runtime.threads or len(os.sched_getaffinity(0)))
    if runtime.deterministic:
        torch.use_deterministic_algorithms(True)


class PolicyAssembly:
    """Builds the learning half of a policy run around the asking half, and checks that they fit."""

    def __init__(self, config: PolicyRunConfig, model: ModelConfig, language: Language, place: Place) -> None:
        self._config = config
        self._model = model
        self._language = language
        self._place = place
        update = config.update
        self._steps_per_batch = update.minibatches * update.epochs
        self._temperature = config.rollout.sampling.temperature or 1.0

    def trainer(self, answering: Answering) -> PolicyTrainer:
        """The trainer, with weight version 0 served. Raises ConfigError if parts do not fit each other."""
        config = self._config
        algorithm = self._algorithm()
        prompts = PromptStream(config.data, self._language.renderer, config.run.seed)
        actor = self._actor()
        answering.rollout.sync_from(actor, version=0)
        per_step = config.tracking.rollouts_per_step
        parts = PolicyParts(
            prompts=prompts,
            answering=answering,
            algorithm=algorithm,
            actor=actor,
            critic=self._critic() if algorithm.needs_values else None,
            reference=self._reference() if algorithm.needs_reference else None,
            gallery=Gallery(self._place.tracking, None if per_step == "all" else per_step),
        )
        return PolicyTrainer(config, parts, self._place)

    def _algorithm(self) -> Algorithm:
        config = self._config
        try:
            algorithm = Algorithm(config.algorithm, self._steps_per_batch, config.rollout.sampling.max_response_tokens)
        except ValueError as error:
            raise ConfigError(f"algorithm: {error}") from error
        self._require_fields(algorithm)
        return algorithm

    def _require_fields(self, algorithm: Algorithm) -> None:
        """Raise ConfigError if the algorithm reads something that no part of this run produces."""
        config = self._config
        produced = {"rewards", "rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "extras.sum_pi_squared"}
        produced |= {f"components.{name}" for name in config.reward.components}
        outputs = {"entropy", "sum_pi_squared"}  # what an engine's forward can give beyond log-probs
        missing = sorted((algorithm.required_fields - produced) | (algorithm.policy_objective().needs - outputs))
        if missing:
            raise ConfigError(
                f"algorithm {algorithm.name}: needs {', '.join(missing)}, which no part of this run produces "
                f"(there is: {', '.join(sorted(produced))})"
            )
        advantage = config.algorithm.advantage.name
        if config.critic is None and algorithm.needs_values:
            raise ConfigError(f"critic: algorithm.advantage {advantage} needs a critic; add the section `critic: {{}}`")
        if config.critic is not None and not algorithm.needs_values:
            raise ConfigError(f"critic: algorithm.advantage {advantage} has no critic; remove the section")
        if config.reference is not None and not algorithm.needs_reference:
            raise ConfigError("reference: algorithm.kl.coef is 0, so there is no reference; remove the section")

    @property
    def _optimizer_steps(self) -> int:
        return self._config.run.steps * self._steps_per_batch

    def _actor(self) -> TrainHandle:
        config = self._config
        steps = self._optimizer_steps
        if config.critic is not None:  # its schedule begins when it does
            steps = max(1, steps - config.critic.warmup_steps * self._steps_per_batch)
        spec = TrainSpec(self._model, config.actor, temperature=self._temperature, total_steps=steps)
        return self._role("actor", spec)

    def _reference(self) -> TrainHandle:
        """The policy before training, asked only: it computes as the actor does."""
        spec = TrainSpec(self._config.reference or self._model, self._config.actor, temperature=self._temperature)
        return self._role("reference", spec)

    def _critic(self) -> TrainHandle:
        critic = self._config.critic
        assert critic is not None  # `_require_fields` saw to it
        model = critic.model or self._model
        return self._role("critic", TrainSpec(model, critic.engine, "value_model", total_steps=self._optimizer_steps))

    def _role(self, role: str, spec: TrainSpec) -> TrainHandle:
        return place_role(role, spec, self._config.runtime, self._place.recorder)


def assemble_supervised(
    config: SupervisedRunConfig, model: ModelConfig, language: Language, place: Place, data_key: str = "data"
) -> SupervisedTrainer:
    """A supervised trainer with its data opened and its model loaded; `data_key` is where the data is set."""
    samples = SampleStream(config.data, language.renderer, config.run.seed, data_key)
    held_out = {name: _held_out(name, one, language, place) for name, one in config.evaluation_sets.items()}
    spec = TrainSpec(model, config.engine, total_steps=config.run.steps)
    parts = SupervisedParts(
        samples=samples,
        model=place_role("model", spec, config.runtime, place.recorder),
        loss=SftObjective(),
        aggregation=config.aggregation,
        held_out=held_out,
        samples_per_step=config.samples_per_step,
        evaluate_every=config.evaluation_every_steps,
    )
    return SupervisedTrainer(config.run.steps, config.checkpoint, parts, place)


def _held_out(name: str, config: DatasetConfig, language: Language, place: Place) -> Sequence[Sample]:
    samples, dropped = read_samples(name, config, language.renderer, f"evaluation_sets.{name}")
    if dropped:
        place.tracking.message(f"evaluation set {name}: {dropped} samples are too long and were dropped")
    return samples
