"""Wires a policy run: settings in, a trainer whose parts fit each other out. The only place that knows all its parts.

model folder --+--> actor, critic, reference, teachers, process reward model (train workers) --.
               +--> answering (rollout engine, rewards) --------------------------------------+--> PolicyTrainer
data ------------> prompt stream -------------------------------------------------------------'
"""

from __future__ import annotations

import os
from typing import Any

import torch

from hone.algorithms.algorithm import Algorithm, check_takes_token_rewards
from hone.algorithms.distillation import Distillation
from hone.algorithms.objective import FULL_KL
from hone.algorithms.process_reward import PROCESS_REWARDS
from hone.algorithms.shaping import GREEDY_REWARD, OVERLONG
from hone.config import ConfigError
from hone.data.stream import PromptStream
from hone.models.settings import ModelConfig
from hone.models.tokenizer import load_tokenizer
from hone.platforms.host_memory import keep_freed
from hone.registry import unknown
from hone.rollout.settings import RolloutConfig
from hone.runtime import ranks
from hone.runtime.settings import RuntimeConfig
from hone.trainers.answering import Answering, Language, place_role
from hone.trainers.base import Place
from hone.trainers.gallery import Gallery
from hone.trainers.leading import LedTeacher
from hone.trainers.policy import PolicyParts, PolicyTrainer
from hone.trainers.process_reward import ProcessRewards
from hone.trainers.reference import AskedModel, WithoutAdapter, is_its_own_reference, only_asked
from hone.trainers.settings import PolicyRunConfig, TeacherConfig
from hone.trainers.teachers import Teacher, Teachers
from hone.workers.handles import TrainHandle
from hone.workers.rollout import RolloutSpec
from hone.workers.scoring import Scorer, ServedScorer
from hone.workers.train import TrainSpec

TEACHERS = "teachers"  # folder of a run folder, for the logs of their servers


def prepare_process(runtime: RuntimeConfig) -> None:
    """Threads, determinism and memory of this process; its meeting with the other ranks if torchrun started several.

    Raises ConfigError if torchrun started ranks of a runtime that starts its own.
    """
    if ranks.ranks() > 1 and runtime.backend.name != "local":
        raise ConfigError(
            f"runtime.backend: {runtime.backend.name} starts its own ranks, and this is one of {ranks.ranks()} that "
            "torchrun started; start it without torchrun, or set runtime.backend=local"
        )
    ranks.join(runtime.collective_timeout_s)
    keep_freed()
    torch.set_num_threads(runtime.threads or max(1, len(os.sched_getaffinity(0)) // ranks.local_ranks()))
    if runtime.deterministic:
        torch.use_deterministic_algorithms(True)


def require_same_tokens(key: str, model: ModelConfig, tokenizer: Any) -> None:
    """Raise ConfigError if a model's token ids mean something else than the policy's."""
    theirs, ours = load_tokenizer(model).get_vocab(), tokenizer.get_vocab()
    unlike = sorted(token for token in theirs.keys() | ours.keys() if theirs.get(token) != ours.get(token))
    if unlike:
        token = unlike[0]
        raise ConfigError(
            f"{key}: its tokens are not the policy's: {len(unlike)} differ, the first is {token!r}, number "
            f"{theirs.get(token, 'none')} there and {ours.get(token, 'none')} here"
        )


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
        trainer = self.put_together(answering)
        answering.rollout.sync_from(trainer.actor, version=0)
        return trainer

    def put_together(self, answering: Answering) -> PolicyTrainer:
        """The trainer, with no weights in the rollout yet. Raises ConfigError if parts do not fit each other."""
        config = self._config
        algorithm = self._algorithm()
        prompts = PromptStream(config.data, self._language.renderer, config.run.seed)
        actor = self._actor()
        per_step = config.tracking.rollouts_per_step
        parts = PolicyParts(
            prompts=prompts,
            answering=answering,
            algorithm=algorithm,
            actor=actor,
            critic=self._critic() if algorithm.needs_values else None,
            reference=self._reference(actor) if self._needs_reference(algorithm) else None,
            teachers=self._teachers(answering),
            process_rewards=self._process_rewards(),
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
        if algorithm.needs_greedy:  # the trainer then plays one greedy answer to each prompt
            produced.add(f"components.{GREEDY_REWARD}")
            if GREEDY_REWARD in config.reward.components:
                raise ConfigError(
                    f"reward.components.{GREEDY_REWARD}: the name is that of the baseline of {algorithm.name}; "
                    "name the component otherwise"
                )
        if config.process_reward is not None:
            produced.add(f"extras.{PROCESS_REWARDS}")
        outputs = {"entropy", "sum_pi_squared", FULL_KL}  # what an engine's forward can give beyond log-probs
        if config.algorithm.overlong is not None:
            produced.add(f"components.{OVERLONG}")
        fields = {
            name for name in algorithm.required_fields if name.partition("/")[0] not in produced
        }  # x/y: part of x
        missing = sorted(fields | (algorithm.policy_objective().needs - outputs))
        if missing:
            raise ConfigError(
                f"algorithm {algorithm.name}: needs {', '.join(missing)}, which no part of this run produces "
                f"(there is: {', '.join(sorted(produced))})"
            )
        advantage = config.algorithm.advantage.name
        if config.critic is None and algorithm.needs_values:
            raise ConfigError(f"critic: algorithm.advantage {advantage} needs a critic; add the section `critic: {{}}`")
        if config.critic is not None and config.critic.warmup_steps >= config.run.steps:
            raise ConfigError(
                f"critic.warmup_steps = {config.critic.warmup_steps} should be less than run.steps = "
                f"{config.run.steps}: the policy would never be trained"
            )
        if config.critic is not None and not algorithm.needs_values:
            raise ConfigError(f"critic: algorithm.advantage {advantage} has no critic; remove the section")
        if config.reference is not None and not self._needs_reference(algorithm):
            raise ConfigError("reference: algorithm.kl.coef is 0, so there is no reference; remove the section")
        self._require_process_rewards(algorithm)
        self._require_replay(algorithm)

    def _require_replay(self, algorithm: Algorithm) -> None:
        """Raise ConfigError if routes of a forward are to be replayed that this run does not make."""
        config = self._config
        if config.actor.routing_replay == "old_logprobs" and not algorithm.needs_old_logprobs:
            raise ConfigError(
                f"actor.moe.routing_replay: old_logprobs, but {algorithm.name} takes its old log-probs from no forward "
                f"of their own here (update.minibatches x update.epochs = {self._steps_per_batch}, "
                f"algorithm.correction.old: {config.algorithm.correction.old}): there is nothing to replay; "
                "set none, or rollout"
            )

    def _require_process_rewards(self, algorithm: Algorithm) -> None:
        """Raise ConfigError if the process reward model has no use, or nothing to learn from."""
        process = self._config.process_reward
        if process is None:
            return
        if f"extras.{PROCESS_REWARDS}" not in algorithm.required_fields:
            advantage = self._config.algorithm.advantage.name
            raise ConfigError(f"process_reward: algorithm.advantage {advantage} has no use for it (prime has)")
        known = ["reward", *self._config.reward.components]
        if process.outcome.partition("/")[0] not in known:
            raise ConfigError(unknown("process_reward.outcome", process.outcome, known))

    def _needs_reference(self, algorithm: Algorithm) -> bool:
        return algorithm.needs_reference or self._config.process_reward is not None

    @property
    def _optimizer_steps(self) -> int:
        return self._config.run.steps * self._steps_per_batch

    def _actor(self) -> TrainHandle:
        config = self._config
        steps = self._optimizer_steps
        if config.critic is not None:  # its schedule begins when it does
            steps -= config.critic.warmup_steps * self._steps_per_batch
        kl = config.algorithm.kl
        whole = kl.kind == "full" and kl.coef > 0  # then the actor compares its own logits with the reference's
        spec = TrainSpec(
            self._model,
            config.actor,
            temperature=self._temperature,
            total_steps=steps,
            reference=self._reference_model if whole else None,
        )
        return self._role("actor", spec)

    @property
    def _reference_model(self) -> ModelConfig:
        return self._config.reference or self._model

    def _reference(self, actor: TrainHandle) -> AskedModel:
        """The policy before training, asked only: it computes as the actor does."""
        other, engine = self._config.reference, self._config.actor
        if other is not None:
            require_same_tokens("reference", other, self._language.renderer.tokenizer)
        elif is_its_own_reference(engine):
            return WithoutAdapter(actor)
        asked = only_asked(engine, as_trained=other is None)
        return self._role("reference", TrainSpec(self._reference_model, asked, temperature=self._temperature))

    def _teachers(self, answering: Answering) -> Teachers | None:
        """The teachers by name, asked only. Raises ConfigError for one whose tokens are not the policy's."""
        config = self._config.distillation
        if config is None:
            return None
        if config.where == "in_reward":
            try:
                check_takes_token_rewards(self._config.algorithm.advantage, "distillation.where: in_reward")
            except ValueError as error:
                raise ConfigError(str(error)) from error
        found = {}
        for name, one in config.teachers.items():
            require_same_tokens(f"distillation.teachers.{name}", one.model, self._language.renderer.tokenizer)
            found[name] = self._teacher(name, one, answering)
        return Teachers(config, found, Distillation(config), self._place.recorder)

    def _teacher(self, name: str, config: TeacherConfig, answering: Answering) -> Teacher:
        if config.served_by == "rollout":
            return self._rollout_teacher(name, config, answering)
        engine = config.engine or only_asked(self._config.actor)
        return self._role(f"teacher_{name}", TrainSpec(config.model, engine, temperature=self._temperature))

    def _rollout_teacher(self, name: str, config: TeacherConfig, answering: Answering) -> Teacher:
        """A rollout engine with the teacher's weights, on the first rank."""
        scorer: Teacher | None = None
        if ranks.is_first():
            scorer = answering.once(f"teacher {name}", lambda: self._scorer(name, config, answering))
        return scorer if scorer is not None and ranks.ranks() == 1 else LedTeacher(scorer, answering.lead)

    def _scorer(self, name: str, config: TeacherConfig, answering: Answering) -> Teacher:
        """Raises ConfigError for a loss or a temperature that the engine knows nothing of."""
        key = f"distillation.teachers.{name}"
        compute = (config.engine or self._config.actor).compute_dtype
        settings = config.rollout or RolloutConfig(builtin=self._config.rollout.builtin)
        if settings.backend == "builtin":
            distillation = self._config.distillation
            if distillation is not None and distillation.loss.name != "reverse_kl":
                raise ConfigError(
                    f"{key}.served_by: the built-in rollout engine scores sampled tokens; loss "
                    f"{distillation.loss.name} needs engine, or a server (rollout.backend)"
                )
            return Scorer(config.model, settings.builtin, compute, self._temperature)
        if self._temperature != 1:
            raise ConfigError(
                f"{key}.rollout.backend: {settings.backend} says how likely it finds tokens at temperature 1, and "
                f"rollout.sampling.temperature is {self._temperature:g}; take served_by: engine, or temperature 1"
            )
        spec = RolloutSpec(
            settings=settings,
            weights=self._config.weights,
            model=config.model,
            compute_dtype=compute,
            tokenizer=self._language.renderer.tokenizer,
            folder=self._place.folder / TEACHERS / name,
            runtime=self._config.runtime,
            role=f"teacher_{name}",
        )
        try:
            scorer = ServedScorer(spec, answering.loop.run)
        except ConfigError as error:
            raise ConfigError(f"{key}.rollout: {error}") from error
        answering.ends(scorer.close)
        return scorer

    def _process_rewards(self) -> ProcessRewards | None:
        config = self._config.process_reward
        if config is None:
            return None
        if config.model is not None:
            require_same_tokens("process_reward.model", config.model, self._language.renderer.tokenizer)
        parts = self._config.update.minibatches
        spec = TrainSpec(
            config.model or self._model,
            config.engine,
            temperature=self._temperature,
            total_steps=self._config.run.steps * parts,
        )
        return ProcessRewards(config, self._role("process_reward", spec), self._place.recorder, parts)

    def _critic(self) -> TrainHandle:
        critic = self._config.critic
        assert critic is not None  # `_require_fields` saw to it
        if critic.model is not None:  # a reward model, say
            require_same_tokens("critic.model", critic.model, self._language.renderer.tokenizer)
        model = critic.model or self._model
        return self._role("critic", TrainSpec(model, critic.engine, "value_model", total_steps=self._optimizer_steps))

    def _role(self, role: str, spec: TrainSpec) -> TrainHandle:
        return place_role(role, spec, self._config.runtime, self._place.recorder)
