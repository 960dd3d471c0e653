"""Builds the trainer of a policy run from its settings. Only this file knows all parts.

model folder --+--> actor, critic, reference, teachers, process reward model (train workers) --.
               +--> generation (rollout engine, rewards) --------------------------------------+--> PolicyTrainer
data ------------> prompt stream -------------------------------------------------------------'
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from hone.algorithms.algorithm import Algorithm
from hone.algorithms.distillation.losses import Distillation
from hone.data.rendering import Renderer
from hone.data.stream import PromptStream
from hone.models.settings import ModelConfig
from hone.schedule.journal import JOURNAL, Journal, read_journal
from hone.schedule.replay import RecordedRun
from hone.schedule.settings import AsynchronyConfig
from hone.schedule.window import Window
from hone.trainers.policy.annotators import (
    Annotator,
    OldLogprobs,
    ProcessRewards,
    ReferenceLogprobs,
    Values,
    declared_stages,
    old_logprob_needs,
)
from hone.trainers.policy.budgets import TokenBudgets
from hone.trainers.policy.checks import algorithm_of, distillation_of, optimizer_steps
from hone.trainers.policy.collection import RolloutLog
from hone.trainers.policy.feed import Feed
from hone.trainers.policy.generation import Generation
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.policy.streaming import RolloutLogWithoutGap, StreamingSupply, StreamingTrainer, edges_of
from hone.trainers.policy.supply import CheckFn, PromptSupply
from hone.trainers.policy.teachers import TeacherChoice, TeacherPlacement, Teachers
from hone.trainers.policy.trainer import PolicyParts, PolicyTrainer
from hone.trainers.run.context import RunContext
from hone.trainers.run.following import Follower
from hone.trainers.run.learners import Learner, Trained
from hone.trainers.run.roles import (
    frozen_engine,
    is_its_own_reference,
    place_role,
    require_same_vocabulary,
)
from hone.trainers.run.settings import FollowConfig
from hone.workers.scoring import ScoringModel, WithoutAdapter
from hone.workers.train import TrainHandle, TrainSpec


class PolicyAssembly:
    """Builds the models and the trainer of a policy run around its generation, and checks that they fit."""

    def __init__(
        self,
        config: PolicyRunConfig,
        model: ModelConfig,
        renderer: Renderer,
        context: RunContext,
        generation: Generation,
    ) -> None:
        self._config = config
        self._model = model
        self._renderer = renderer
        self._context = context
        self._generation = generation
        self._steps_per_batch = config.update.minibatches * config.update.epochs
        self._temperature = config.rollout.sampling.temperature or 1.0

    def build(self) -> PolicyTrainer:
        """The trainer. No server runs yet. Raises ConfigError if parts do not fit each other."""
        config, algorithm, distillation = self._config, self._algorithm, self._distillation
        stages = declared_stages(config, algorithm, distillation)
        prompts = PromptStream(config.data, self._renderer, config.run.seed)
        self._generation.check_ground_truth(prompts.peek(config.update.prompts_per_step))
        self._generation.check_sets()
        self._generation.begin()
        play, feed, budgets = self._generation.play, self._feed(), TokenBudgets(config)
        sampling = replace(play.sampling, max_sequence_tokens=budgets.longest)
        teacher_choice = self._teacher_choice()
        checks = [budgets.check_drawn, *([] if teacher_choice is None else [teacher_choice.check])]
        streams = config.asynchrony is not None and config.asynchrony.stream
        parts = PolicyParts(
            supply=self._supply(prompts, feed, checks, streams),
            feed=feed,
            play=replace(play, sampling=sampling, greedy=algorithm.needs_greedy),
            algorithm=algorithm,
            actor=self._actor,
            learners=self._learners(),
            annotators=[self._annotator(stage.name) for stage in stages],
            adjust=[] if distillation is None else [distillation.after_advantages],
            teacher_choice=teacher_choice,
            rollout_log=self._rollout_log(streams),
            evaluator=self._generation.evaluator(self._context.tracking),
            rollout=self._generation.rollout,
        )
        return (StreamingTrainer if streams else PolicyTrainer)(config, parts, self._context)

    def _supply(self, prompts: PromptStream, feed: Feed, checks: Sequence[CheckFn], streams: bool) -> PromptSupply:
        update, measure = self._config.update, self._generation.collector.metrics
        parts = (prompts, feed, self._algorithm.groups, measure, self._config.run.seed, checks)
        if streams:
            return StreamingSupply(*parts, edges=edges_of(update.prompts_per_step, update.minibatches))
        return PromptSupply(*parts)

    def _rollout_log(self, streams: bool) -> RolloutLog:
        per_step = self._config.tracking.rollouts_per_step
        log = RolloutLogWithoutGap if streams else RolloutLog
        return log(self._context.tracking, None if per_step == "all" else per_step)

    def _learners(self) -> list[Learner]:
        """The critic before the actor on each mini-batch; a reference that follows moves after them."""
        config, algorithm, policy = self._config, self._algorithm, self._algorithm.policy_objective()
        loss = policy if self._distillation is None else self._distillation.objective(policy)
        actor = Trained(self._actor, loss, first=1 + (config.critic.warmup_steps if config.critic else 0))
        critic = [Trained(self._critic, algorithm.value_objective())] if algorithm.needs_values else []
        follow = self._follow
        following = [] if follow is None else [Follower(self._own_reference, self._actor, follow)]
        return [*critic, actor, *following]

    def _feed(self) -> Feed:
        config, generation = self._config, self._generation
        asynchrony = config.asynchrony or AsynchronyConfig()
        one_version = asynchrony.staleness == 0 or asynchrony.new_weights == "finish"
        window = Window(asynchrony.staleness, config.update.prompts_per_step, config.run.total_steps, one_version)
        journal = Journal(self._context.folder / JOURNAL, self._plan())
        drain_s = asynchrony.drain_timeout_s if asynchrony.staleness else 0.0
        return Feed(window, generation.collector, generation.rollout, self._context.recorder, journal, drain_s)

    def _annotator(self, stage: str) -> Annotator:
        """Load the model of a stage of `declared_stages`."""
        if stage == "actor":
            return OldLogprobs(self._actor, old_logprob_needs(self._config, self._algorithm))
        if stage == "critic":
            return Values(self._critic)
        if stage == "reference":
            return ReferenceLogprobs(self._reference_role(), self._algorithm.reference_needs)
        return self._teachers() if stage == "distillation" else self._process_rewards()

    def _plan(self) -> RecordedRun | None:
        """The record that this run repeats, whose versions stay in memory as long as it needs them."""
        path = self._context.control.replay
        if path is None:
            return None
        plan = RecordedRun(path, list(read_journal(path)))
        if plan.last_step < self._config.run.total_steps:
            self._context.tracking.message(f"{path} ends with step {plan.last_step}; later steps are not a replay")
        self._generation.rollout.keep_while(plan.needs)
        return plan

    @cached_property
    def _algorithm(self) -> Algorithm:
        return algorithm_of(self._config)

    @cached_property
    def _distillation(self) -> Distillation | None:
        return distillation_of(self._config)

    @cached_property
    def _actor(self) -> TrainHandle:
        config = self._config
        kl = config.algorithm.penalty
        whole = kl.coef > 0 and kl.kind == "full"  # then the actor compares its own logits with the reference's
        spec = TrainSpec(
            self._model,
            config.actor,
            temperature=self._temperature,
            total_steps=optimizer_steps(config)["actor"],
            reference=self._reference_model if whole else None,
        )
        return self._role("actor", spec)

    @property
    def _reference_model(self) -> ModelConfig:
        return self._other_reference or self._model

    @property
    def _other_reference(self) -> ModelConfig | None:
        return None if self._config.reference is None else self._config.reference.model

    def _reference_role(self) -> ScoringModel:
        """The policy before training, or another model; it computes with the actor's engine."""
        other, engine = self._other_reference, self._config.actor
        if other is not None:
            require_same_vocabulary("reference.model", other, self._renderer.tokenizer)
        elif is_its_own_reference(engine):
            return WithoutAdapter(self._actor)
        return self._own_reference

    @cached_property
    def _own_reference(self) -> TrainHandle:
        asked = frozen_engine(self._config.actor, keep_adapter=self._other_reference is None)
        follows = self._follow is not None
        spec = TrainSpec(self._reference_model, asked, temperature=self._temperature, follows=follows)
        return self._role("reference", spec)

    @property
    def _follow(self) -> FollowConfig | None:
        return None if self._config.reference is None else self._config.reference.follow

    def _teacher_choice(self) -> TeacherChoice | None:
        config = self._config.distillation
        return None if config is None else TeacherChoice(config.teacher_field, list(config.teachers))

    def _teachers(self) -> Teachers:
        config = self._config.distillation
        assert config is not None
        assert self._distillation is not None
        placing = TeacherPlacement(self._config, self._renderer.tokenizer, self._context, self._generation)
        found = [placing.place(name, one) for name, one in config.teachers.items()]
        return Teachers(found, self._distillation, self._context.recorder)

    def _process_rewards(self) -> ProcessRewards:
        config = self._config.process_reward
        assert config is not None
        if config.model is not None:
            require_same_vocabulary("process_reward.model", config.model, self._renderer.tokenizer)
        parts = self._config.update.minibatches
        spec = TrainSpec(
            config.model or self._model,
            config.engine,
            temperature=self._temperature,
            total_steps=optimizer_steps(self._config)["process_reward.engine"],
        )
        return ProcessRewards(config, self._role("process_reward", spec), self._context.recorder, parts)

    @cached_property
    def _critic(self) -> TrainHandle:
        critic = self._config.critic
        assert critic is not None  # `check_policy_run` saw to it
        if critic.model is not None:  # a reward model, say
            require_same_vocabulary("critic.model", critic.model, self._renderer.tokenizer)
        model = critic.model or self._model
        steps = optimizer_steps(self._config)["critic.engine"]
        return self._role("critic", TrainSpec(model, critic.engine, "value_model", total_steps=steps))

    def _role(self, role: str, spec: TrainSpec) -> TrainHandle:
        return place_role(role, spec, self._config.runtime, self._context.recorder)
