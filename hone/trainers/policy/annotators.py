"""The models that add fields to a collected batch before its advantages are computed.

    old log-probs -> values -> reference log-probs -> teachers -> process rewards        (those that the run has)

`declared_stages` lists the annotators of a run. Start-up checks read the list to see whether every field that the
algorithm needs is filled, before any model is loaded; `PolicyAssembly` then builds each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hone.algorithms.aggregation import loss_weights
from hone.algorithms.algorithm import Algorithm
from hone.algorithms.distillation.losses import Distillation
from hone.algorithms.process_reward.losses import (
    OUTCOMES,
    PROCESS_REWARDS,
    ProcessRewardObjective,
    implicit_rewards,
    measure_process_rewards,
)
from hone.algorithms.settings import AggregationSettings
from hone.config import ConfigError
from hone.data.packing import minibatches, select
from hone.models.routing import ROUTES
from hone.trainers.policy.settings import PolicyRunConfig, ProcessRewardConfig
from hone.trainers.run.recorder import Recorder
from hone.types import Batch
from hone.workers.scoring import ScoringModel
from hone.workers.train import TrainHandle

AGGREGATION = AggregationSettings(mode="seq_mean_token_sum")  # a process reward model's loss is one number per answer


class Annotator(Protocol):
    """Adds fields to a batch."""

    @property
    def learner(self) -> TrainHandle | None:
        """The model that this annotator trains while it annotates, if any."""

    def __call__(self, batch: Batch) -> Batch:
        """The batch with more fields."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Fields that one annotator of a run reads and fills."""

    name: str
    provides: frozenset[str]  # fields of `Batch` that it fills; `components.x` names a reward component
    needs: frozenset[str]  # fields that have to be filled before


def declared_stages(config: PolicyRunConfig, algorithm: Algorithm, distillation: Distillation | None) -> list[Stage]:
    """Return the stages that annotate a batch, in this order."""
    stages = []
    if algorithm.needs_old_logprobs or (distillation is not None and distillation.needs_old_logprobs):
        fields = {"old_logprobs", *old_logprob_needs(config, algorithm)}
        stages.append(Stage("actor", frozenset(fields), frozenset()))
    if algorithm.needs_values:
        stages.append(Stage("critic", frozenset({"values"}), frozenset()))
    if algorithm.needs_reference or config.process_reward is not None:
        stages.append(Stage("reference", frozenset({"ref_logprobs"}), frozenset()))
    if distillation is not None:
        in_reward = {"token_rewards"} if distillation.fills_token_rewards else set()
        needed = frozenset({"old_logprobs"} if distillation.needs_old_logprobs else ())
        stages.append(Stage("distillation", frozenset({"teacher_logprobs"} | in_reward), needed))
    if config.process_reward is not None:
        stages.append(Stage("process_reward", frozenset({"process_rewards"}), frozenset({"ref_logprobs", "rewards"})))
    return stages


def old_logprob_needs(config: PolicyRunConfig, algorithm: Algorithm) -> frozenset[str]:
    """Return the outputs of the forward for old log-probs beyond these."""
    routes = {ROUTES} if config.actor.routing_replay == "old_logprobs" else set()
    return frozenset(algorithm.infer_needs | routes)


def check_stages(stages: Iterable[Stage], collected: frozenset[str]) -> frozenset[str]:
    """All fields that are filled after the last stage. Raises ConfigError for a stage that reads a missing field."""
    filled = collected
    for stage in stages:
        missing = sorted(stage.needs - filled)
        if missing:
            raise ConfigError(f"{stage.name}: needs {', '.join(missing)}, which no earlier part of this run produces")
        filled |= stage.provides
    return filled


class OldLogprobs:
    """The policy's log-probs before the update, and other outputs of the same forward."""

    learner: TrainHandle | None = None

    def __init__(self, actor: TrainHandle, needs: frozenset[str]) -> None:
        """`needs` names outputs beyond log-probs; they become the fields of `Batch` with their names."""
        self._actor = actor
        self._needs = needs

    def __call__(self, batch: Batch) -> Batch:
        output = self._actor.infer_batch(batch, self._needs)
        outputs = {"entropy": output.entropy, **output.extras}
        return batch.with_(old_logprobs=output.logprobs, **{name: outputs[name] for name in self._needs})


class Values:
    """The critic's value of the state before each token."""

    learner: TrainHandle | None = None  # the critic learns with the actor, after annotation

    def __init__(self, critic: TrainHandle) -> None:
        self._critic = critic

    def __call__(self, batch: Batch) -> Batch:
        return batch.with_(values=self._critic.infer_batch(batch).values)


class ReferenceLogprobs:
    """The reference model's log-probs; for KL over the whole vocabulary also its hidden states."""

    learner: TrainHandle | None = None

    def __init__(self, reference: ScoringModel, needs: frozenset[str]) -> None:
        """`needs`: {"states"} for the hidden states."""
        self._reference = reference
        self._needs = needs

    def __call__(self, batch: Batch) -> Batch:
        output = self._reference.infer_batch(batch, self._needs)
        batch = batch.with_(ref_logprobs=output.logprobs)
        if "states" not in self._needs:
            return batch
        return batch.with_(reference_states=output.extras["states"])


class ProcessRewards:
    """The process rewards of a model that learns from outcomes while the policy trains (PRIME).

    It trains on the outcomes of each batch in one pass, and rewards each token.
    """

    def __init__(self, config: ProcessRewardConfig, model: TrainHandle, recorder: Recorder, parts: int) -> None:
        """`parts` is the number of optimizer steps in one pass over a batch."""
        self.learner: TrainHandle = model
        self._beta = config.beta
        self._outcome = config.outcome
        self._first = config.update == "before"
        self._recorder = recorder
        self._parts = parts
        self._objective = ProcessRewardObjective(config.beta)

    def __call__(self, batch: Batch) -> Batch:
        """The batch with the process reward of each token; the model learns from the batch before or after.

        Raises ValueError for an outcome that is not between 0 and 1.
        """
        batch = OUTCOMES.on(batch, self._outcomes(batch))
        if self._first:
            self._learn(batch)
        batch = self._rewarded(batch)
        if not self._first:
            self._learn(batch)
        self._recorder.record(measure_process_rewards(batch))
        return batch

    def _outcomes(self, batch: Batch) -> Tensor:
        found = batch.rewards if self._outcome == "reward" else batch.components.get(self._outcome)
        if found is None:
            raise ValueError(f"process_reward.outcome: {self._outcome!r} is not filled (reward, or a component)")
        wrong = ~((found >= 0) & (found <= 1))
        if bool(wrong.any()):
            raise ValueError(
                f"process_reward.outcome = {self._outcome} should be between 0 and 1, found "
                f"{found[wrong][0].item():g}; name a reward component that is"
            )
        return found

    def _learn(self, batch: Batch) -> None:
        count = min(self._parts, len(torch.unique(batch.group_index)))
        for indices in minibatches(batch, count, epoch=0, seed=0):
            part = select(batch, indices)
            weights = loss_weights(part.loss_mask, part.cu_seqlens, AGGREGATION)
            self.learner.train_batch(part.with_(loss_weights=weights), self._objective)

    def _rewarded(self, batch: Batch) -> Batch:
        lp, ref = self.learner.infer_batch(batch).logprobs, batch.ref_logprobs
        assert lp is not None
        assert ref is not None  # `check_stages` saw to it
        return PROCESS_REWARDS.on(batch, implicit_rewards(lp, ref, batch.sampled_mask, self._beta))


def learners_of(annotators: Sequence[Annotator]) -> list[TrainHandle]:
    """The models that annotators train."""
    return [one.learner for one in annotators if one.learner is not None]
