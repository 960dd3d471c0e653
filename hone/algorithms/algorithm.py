"""`Algorithm`: the interface of this package for trainers.

groups --groups.shape, groups.keep--> groups worth training on --(packing, forwards)--> batch
batch --advantages--> batch with token rewards, advantages, returns --(cut)--> mini-batch
mini-batch --weigh--> mini-batch with loss weights --(engine, policy_objective / value_objective)--> gradients
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hone.algorithms import ADVANTAGES
from hone.algorithms.advantages import Advantages, token_rewards
from hone.algorithms.aggregation import StepCounts, loss_weights, step_counts
from hone.algorithms.correction import IS_WEIGHTS, accepted, importance_weights, mismatch, normalized
from hone.algorithms.filtering.group_filter import GREEDY_REWARD, GroupFilter
from hone.algorithms.filtering.resampling import resample
from hone.algorithms.kl import adapt_coef, kl_penalty
from hone.algorithms.objective import FULL_KL, POSITIVE, SELECTED, PolicyObjective, ValueObjective
from hone.algorithms.segments import in_dtype_of, loss_token_counts, masked_mean, sequence_mean, spread
from hone.algorithms.settings import (
    AggregationSettings,
    AlgorithmConfig,
    GaeSettings,
)
from hone.config import Config
from hone.registry import resolve
from hone.types import Axis, Batch, Extra, Metric, Metrics

REPEATS = Extra("repeats", Axis.SEQUENCE)  # [N]: how often the trajectory counts (PF-PPO)
REJECTED = Extra("rejected")  # [T]: tokens that a rejection rule took out of the loss mask


class Algorithm:
    """One algorithm as a run file describes it; its state is the KL coefficient and the history of prompts.

    `groups` shapes and filters trajectories; all other methods work on packed batches. `steps_per_batch` is the number
    of optimizer steps on one collected batch (mini-batches x epochs). Only the overlong penalty reads
    `max_response_tokens`, only resampling reads `seed`. Raises ValueError for settings that contradict each other,
    UnknownName for an unknown estimator or loss.
    """

    def __init__(
        self, config: AlgorithmConfig, steps_per_batch: int, max_response_tokens: int | None = None, seed: int = 0
    ) -> None:
        if steps_per_batch < 1:
            raise ValueError(f"steps_per_batch should be at least 1, found {steps_per_batch}")
        config.check_reward_shaping()
        self.name = config.preset or f"{config.advantage.name} + {config.loss.name}"
        self.groups = GroupFilter(config, max_response_tokens)
        self._estimator: Callable[[Batch, Any], Advantages] = ADVANTAGES.get(config.advantage.name)
        self._advantage = config.advantage
        self._loss = config.loss
        self._selection = config.loss.selection
        self._kl = config.penalty
        self._correction = config.correction
        self._rejections = config.correction.rules("old")
        self._resample = config.resample
        self._seed = seed
        self._nll_coef = config.positive_nll_coef
        self._steps_per_batch = steps_per_batch
        self._aggregation = _resolved(config)
        self._policy_objective = PolicyObjective(config)
        self._value_objective = ValueObjective(config.value_loss) if self.needs_values else None
        self._kl_coef = self._kl.coef
        adaptive = self._kl.adaptive if self._kl.coef > 0 else None
        self._steering = None if adaptive is None else (adaptive.target, adaptive.horizon)
        self._batches = 0
        sampling = config.dynamic_sampling
        skipping = None if sampling is None else sampling.skip_zero_variance
        parts = (config.advantage, config.loss, config.kl, config.correction, config.overlong, config.resample)
        inner = getattr(config.loss, "loss", None)
        for part in (*parts, sampling, skipping, inner, *config.correction.rejections):
            _take(part)

    # ------------------------------------------------------------------------------------------ what a run must have

    @property
    def needs_old_logprobs(self) -> bool:
        """Return whether a forward must run before the update; with one step per batch, old is the current policy."""
        if self._correction.old == "rollout":
            return bool(self.infer_needs)  # for what comes with the forward; its log-probs give way to the rollout's
        declared = "old_logprobs" in self._advantage.required_fields
        before_the_step = bool(self._correction.normalize or self._rejections or self._kl_in_reward)
        return self._steps_per_batch > 1 or before_the_step or declared or bool(self._selection)

    @property
    def needs_reference(self) -> bool:
        return self._kl.coef > 0

    @property
    def needs_greedy(self) -> bool:
        """Return whether the trainer also samples one greedy answer per prompt, for its reward."""
        return f"components.{GREEDY_REWARD}" in self.required_fields

    @property
    def needs_values(self) -> bool:
        """Return whether the run also trains a critic."""
        return "values" in self._advantage.required_fields

    @property
    def required_fields(self) -> frozenset[str]:
        """Fields of `Batch` to fill before `advantages`; `components.x` names a reward component."""
        fields = {*self._advantage.required_fields, *self._loss.required_fields}
        uses_rollout = self._correction.old == "rollout" or self._correction.weights or self._correction.rejections
        if self._correction.old == "rollout":
            fields.discard("old_logprobs")
        elif self.needs_old_logprobs:
            fields.add("old_logprobs")
        if uses_rollout:
            fields.add("rollout_logprobs")
        if self.needs_reference and self._kl.kind != "full":
            fields.add("ref_logprobs")
        if self._nll_coef or self._resample is not None:
            fields.add("rewards")
        return frozenset(fields)

    @property
    def infer_needs(self) -> frozenset[str]:
        """Outputs of the forward for `old_logprobs` beyond log-probs, which become fields of the batch."""
        return (self._advantage.required_fields | self._loss.required_fields) & {"entropy", "sum_pi_squared"}

    @property
    def reference_needs(self) -> frozenset[str]:
        """Outputs of the reference's forward beyond log-probs."""
        return frozenset({"states"} if FULL_KL in self._policy_objective.needs else ())

    @property
    def kl_coef(self) -> float:
        """The current coefficient, which changes only with `kl.adaptive`."""
        return self._kl_coef

    # ------------------------------------------------------------------------------------------------------ batches

    def advantages(self, batch: Batch, pretraining: bool = False) -> Batch:
        """Fill in token rewards, advantages and, with a critic, returns; call it once per collected batch.

        Also removes rejected tokens from the loss mask and updates the adaptive KL coefficient. While only the critic
        learns (`pretraining`), its returns are plain sums of rewards, independent of lambda (VAPO, arXiv 2504.05118,
        section 4.1), and the coefficient stays. Raises ValueError if a required field is missing.
        """
        if self._correction.old == "rollout":
            batch = batch.with_(old_logprobs=_field(batch.rollout_logprobs, "rollout_logprobs"))
        batch = self._with_is_weights(batch)
        batch = self._with_token_rewards(batch, adapt=not pretraining)
        settings = self._advantage
        if pretraining and isinstance(settings, GaeSettings):
            settings = settings.model_copy(update={"critic_lam": 1.0})
        result = self._estimator(batch, settings)
        advantages, returns = (in_dtype_of(batch.rewards, one) for one in (result.advantages, result.returns))
        batch = batch.with_(advantages=advantages, returns=returns)
        if self._resample is not None:
            drawn_by = random.Random(f"resample/{self._seed}/{self._batches}").getrandbits(63)
            repeats = resample(_field(batch.rewards, "rewards"), self._resample, drawn_by)
            batch = REPEATS.on(batch, repeats)
        self._batches += 1
        return self._without_rejected(batch)

    def counts(self, minibatch: Batch) -> StepCounts:
        """Counts of this part of an optimizer step; ranks add up their counts and pass the sum to `weigh`."""
        counts = step_counts(minibatch.loss_mask, minibatch.cu_seqlens, REPEATS.of(minibatch))
        return replace(counts, rewarded_tokens=_rewarded(minibatch).sum().item()) if self._nll_coef else counts

    def weigh(self, minibatch: Batch, counts: StepCounts | None = None) -> Batch:
        """Add the loss weights to a mini-batch (one optimizer step, before any further cut)."""
        counts = counts or self.counts(minibatch)
        weights = loss_weights(
            minibatch.loss_mask,
            minibatch.cu_seqlens,
            self._aggregation,
            counts,
            REPEATS.of(minibatch),
        )
        minibatch = minibatch.with_(loss_weights=weights)
        if self._selection:
            minibatch = SELECTED.on(minibatch, resolve(self._selection)(minibatch, self._loss))
        if self._nll_coef:
            share = _rewarded(minibatch) / max(counts.rewarded_tokens, 1)
            minibatch = POSITIVE.on(minibatch, torch.where(weights > 0, share / weights, 0))
        return minibatch

    def policy_objective(self) -> PolicyObjective:
        """The actor's loss."""
        return self._policy_objective

    def value_objective(self) -> ValueObjective:
        """The critic's loss. Raises ValueError for an estimator without critic."""
        if self._value_objective is None:
            raise ValueError(f"advantage {self._advantage.name} has no critic, so there is no value objective")
        return self._value_objective

    def measure(self, batch: Batch) -> Metrics:
        """Metrics of a batch after `advantages`: mismatch to the rollout, KL to the reference, critic's fit.

        Metrics without their inputs are left out; without old log-probs of the trainer, the objective measures the
        mismatch in its forward.
        """
        rejected = REJECTED.of(batch)
        mask = batch.loss_mask if rejected is None else batch.loss_mask | rejected
        current = batch.old_logprobs
        metrics: Metrics = {}
        itself = self._correction.old == "rollout"  # then the objective measures the gap
        if current is not None and batch.rollout_logprobs is not None and not itself:
            metrics |= mismatch(current, batch.rollout_logprobs, mask, batch.cu_seqlens, self._correction.band)
        if current is not None and batch.ref_logprobs is not None and self._kl.kind != "full":
            kl = masked_mean(kl_penalty(current, batch.ref_logprobs, self._kl.kind), mask)
            metrics["train/reference_kl"] = Metric.mean(kl.item(), int(mask.sum()))
        if self._kl.coef > 0:
            metrics["train/kl_coef"] = Metric.mean(self._kl_coef)
        weights = IS_WEIGHTS.of(batch)
        if weights is not None:
            weight = masked_mean(weights, mask)
            metrics["correction/weight"] = Metric.mean(weight.item(), int(mask.sum()))
        if rejected is not None:
            share = rejected.sum() / mask.sum().clamp(min=1)
            metrics["correction/rejected"] = Metric.mean(share.item(), int(mask.sum()))
        return metrics | _critic_fit(batch)

    # -------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON-compatible values."""
        return {"kl_coef": self._kl_coef, "batches": self._batches, **self.groups.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._kl_coef = float(state["kl_coef"])
        self._batches = int(state["batches"])
        self.groups.load_state_dict(state)

    # -------------------------------------------------------------------------------------------------------- parts

    @property
    def _kl_in_reward(self) -> bool:
        return self._kl.coef > 0 and self._kl.where == "in_reward"

    def _with_is_weights(self, batch: Batch) -> Batch:
        """Add importance weights if the old log-probs are known; otherwise the objective computes them."""
        if self._correction.weights is None or batch.old_logprobs is None:
            return batch
        rollout = _field(batch.rollout_logprobs, "rollout_logprobs")
        sampled = batch.sampled_mask  # a baseline may weigh masked answers, too
        weights = importance_weights(batch.old_logprobs, rollout, sampled, batch.cu_seqlens, self._correction)
        if self._correction.normalize:
            weights = normalized(weights, batch.loss_mask)
        return IS_WEIGHTS.on(batch, weights)

    def _with_token_rewards(self, batch: Batch, adapt: bool) -> Batch:
        rewards = token_rewards(batch)
        if self._kl_in_reward:
            old, ref = _field(batch.old_logprobs, "old_logprobs"), _field(batch.ref_logprobs, "ref_logprobs")
            kl = torch.where(batch.sampled_mask, kl_penalty(old, ref, self._kl.kind), 0)
            rewards = rewards - self._kl_coef * kl
            if adapt:
                self._adapt(kl, batch)
        return batch.with_(token_rewards=rewards)

    def _adapt(self, kl: Tensor, batch: Batch) -> None:
        if self._steering is None:
            return
        rows = loss_token_counts(batch.loss_mask, batch.cu_seqlens) > 0
        if rows.any():
            measured = sequence_mean(kl, batch.loss_mask, batch.cu_seqlens)[rows].mean().item()
            self._kl_coef = adapt_coef(self._kl_coef, measured, *self._steering, int(rows.sum()))

    def _without_rejected(self, batch: Batch) -> Batch:
        if not self._rejections:
            return batch
        old, rollout = _field(batch.old_logprobs, "old_logprobs"), _field(batch.rollout_logprobs, "rollout_logprobs")
        kept = accepted(old, rollout, batch.loss_mask, batch.cu_seqlens, self._rejections, batch.advantages)
        return REJECTED.on(batch, batch.loss_mask & ~kept).with_(loss_mask=kept)


def _resolved(config: AlgorithmConfig) -> AggregationSettings:
    """Replace mode null by the mode of the loss's paper."""
    mode = config.aggregation.mode or config.loss.own_aggregation
    return AggregationSettings(mode=mode, norm_tokens=config.aggregation.norm_tokens)


def _take(settings: Config | None) -> None:
    """Count the settings of a part as read, because its function reads them only after start-up.

    Keys without effect (`ignored`) stay unread, so that setting them in a run file is an error.
    """
    for name in type(settings).model_fields if settings is not None else ():
        if name not in getattr(settings, "ignored", ()):
            getattr(settings, name)


def _rewarded(batch: Batch) -> Tensor:
    """Return how often each loss token of a trajectory with a reward above 0 counts, 0 for other tokens, [T]."""
    times = (_field(batch.rewards, "rewards") > 0).long()
    if (repeats := REPEATS.of(batch)) is not None:
        times = times * repeats
    return torch.where(batch.loss_mask, spread(times, batch.cu_seqlens), 0)


def _critic_fit(batch: Batch) -> Metrics:
    """Explained variance of the returns by the values, 1 at best."""
    tokens = int(batch.loss_mask.sum())
    if batch.values is None or batch.returns is None or tokens < 2:
        return {}
    returns, values = batch.returns[batch.loss_mask].double(), batch.values[batch.loss_mask].double()
    unexplained = (returns - values).var() / returns.var().clamp(min=1e-8)
    return {"critic/explained_variance": Metric.mean(1 - unexplained.item(), tokens)}


def _field(value: Tensor | None, name: str) -> Tensor:
    if value is None:
        raise ValueError(f"Batch.{name} is missing, and this algorithm needs it before it can compute advantages")
    return value
