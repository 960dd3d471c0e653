"""`Algorithm`: the one door through which a trainer uses the mathematics of this package.

groups --shape, keep--> groups worth training on --(packing, forwards)--> batch
batch --advantages--> batch with token rewards, advantages, returns --(cut)--> mini-batch
mini-batch --weigh--> mini-batch with loss weights --(engine, policy_objective / value_objective)--> gradients
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hone.algorithms import ADVANTAGES
from hone.algorithms.advantages import Advantages, token_rewards
from hone.algorithms.aggregation import StepCounts, loss_weights, step_counts
from hone.algorithms.correction import accepted, importance_weights, mismatch, normalized
from hone.algorithms.history import PromptHistory
from hone.algorithms.kl import adapt_coef, kl_penalty
from hone.algorithms.objective import FULL_KL, IS_WEIGHTS, POSITIVE, SELECTED, PolicyObjective, ValueObjective
from hone.algorithms.resampling import resample
from hone.algorithms.segments import loss_token_counts, masked_mean, sequence_mean, spread
from hone.algorithms.settings import (
    AggregationSettings,
    AlgorithmConfig,
    GaeSettings,
    GdpoSettings,
    Mode,
)
from hone.algorithms.shaping import (
    GREEDY_REWARD,
    OVERLONG,
    Dropped,
    check_buffer,
    metric_of,
    punish_overlong,
    split_trainable,
    with_greedy_reward,
)
from hone.config import Choice, Config
from hone.registry import resolve
from hone.types import Batch, Metric, Metrics, TrajectoryGroup

REPEATS = "repeats"  # of Batch.extras: how often each token's trajectory counts (PF-PPO)
OF_OTHER_ROLES = frozenset({"process_rewards"})  # keys of Batch.extras that another model than the actor gives
REJECTED = "rejected"  # of Batch.extras: tokens that a rejection rule took out of the loss mask


class Algorithm:
    """One algorithm, as a run file describes it, with its little state: KL coefficient, history of prompts.

    `steps_per_batch` is the number of optimizer steps on one collected batch (mini-batches x epochs).
    `max_response_tokens` is needed for the overlong penalty only. Raises ValueError where the settings contradict
    each other, UnknownName for an unknown estimator or loss.
    """

    def __init__(self, config: AlgorithmConfig, steps_per_batch: int, max_response_tokens: int | None = None) -> None:
        if steps_per_batch < 1:
            raise ValueError(f"steps_per_batch should be at least 1, found {steps_per_batch}")
        if config.overlong is not None:
            if max_response_tokens is None:
                raise ValueError("algorithm.overlong needs to know the longest response: pass max_response_tokens")
            check_buffer(max_response_tokens, config.overlong)
        check_reward_shaping(config)
        self.name = config.preset or f"{config.advantage.name} + {config.loss.name}"
        self._estimator: Callable[[Batch, Any], Advantages] = ADVANTAGES.get(config.advantage.name)
        self._advantage = config.advantage
        self._loss = config.loss
        self._kl = config.kl
        self._correction = config.correction
        self._sampling = config.dynamic_sampling
        self._overlong = config.overlong
        self._resample = config.resample
        self._nll_coef = config.positive_nll_coef
        self._max_response_tokens = max_response_tokens or 0
        self._steps_per_batch = steps_per_batch
        self._aggregation = _resolved(config)
        self._policy_objective = PolicyObjective(config)
        self._value_objective = ValueObjective(config.value_loss) if self.needs_values else None
        self._kl_coef = config.kl.coef
        adaptive = config.kl.adaptive
        self._steering = None if adaptive is None else (adaptive.target, adaptive.horizon)
        self._batches = 0
        skipping = config.dynamic_sampling.skip_zero_variance if config.dynamic_sampling is not None else None
        self._history = PromptHistory(skipping) if skipping is not None else None
        for part in (config.advantage, config.loss, config.kl, config.correction, config.overlong, config.resample):
            _take_all(part)
        _take_all(config.dynamic_sampling)
        for rule in config.correction.rejections:
            _take_all(rule)

    # ------------------------------------------------------------------------------------------ what a run must have

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether a forward before the update is needed: with one step per batch, old is the current policy."""
        if self._correction.old == "rollout":
            return bool(self.infer_needs)  # for what comes with the forward; its log-probs give way to the rollout's
        kl_in_reward = self._kl.where == "in_reward" and self._kl.coef > 0
        declared = "old_logprobs" in getattr(self._advantage, "required_fields", frozenset())
        before_the_step = bool(self._correction.normalize or self._correction.rejections or kl_in_reward)
        return self._steps_per_batch > 1 or before_the_step or declared or bool(self._selection)

    @property
    def needs_reference(self) -> bool:
        return self._kl.coef > 0

    @property
    def needs_greedy(self) -> bool:
        """Whether every prompt is also answered greedily, for the reward of that answer."""
        return f"components.{GREEDY_REWARD}" in self.required_fields

    @property
    def needs_values(self) -> bool:
        """Whether a critic is trained beside the policy."""
        return "values" in getattr(self._advantage, "required_fields", frozenset())

    @property
    def required_fields(self) -> frozenset[str]:
        """Every field of `Batch` that must be filled before `advantages`; `extras.x` and `components.x` name a key."""
        fields = set(getattr(self._advantage, "required_fields", frozenset({"rewards"})))
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
        """Outputs beyond log-probs that the forward for `old_logprobs` must give; they go into `Batch.extras`."""
        declared: frozenset[str] = getattr(self._advantage, "required_fields", frozenset())
        extras = {name.removeprefix("extras.") for name in declared if name.startswith("extras.")}
        return frozenset(extras - OF_OTHER_ROLES)

    @property
    def reference_needs(self) -> frozenset[str]:
        """Outputs beyond log-probs that the reference's forward must give."""
        return frozenset({"states"} if FULL_KL in self._policy_objective.needs else ())

    @property
    def max_draws(self) -> int:
        """How often a step may draw prompts to replace dropped groups."""
        return self._sampling.max_draws if self._sampling is not None else 1

    @property
    def kl_coef(self) -> float:
        """The coefficient in force; it changes only if it is adaptive."""
        return self._kl_coef

    # ------------------------------------------------------------------------------------------------ trajectories

    @property
    def skips_prompts(self) -> bool:
        """Whether prompts may be skipped before rollout."""
        return self._history is not None

    def skip_probability(self, prompt_id: str) -> float:
        """How likely this prompt should be skipped before rollout, because its last groups taught nothing."""
        return self._history.skip_probability(prompt_id) if self._history is not None else 0.0

    def shape(self, groups: Iterable[TrajectoryGroup]) -> list[TrajectoryGroup]:
        """Groups with the overlong penalty added to their rewards, if there is one."""
        if self._overlong is None:
            return list(groups)
        return punish_overlong(groups, self._max_response_tokens, self._overlong)

    def keep(self, groups: Iterable[TrajectoryGroup]) -> tuple[list[TrajectoryGroup], list[Dropped]]:
        """The groups to train on, and the others as (group marked as not trainable, reason); notes what was seen."""
        groups = list(groups)
        kept, dropped = split_trainable(groups, self._sampling)
        if self._history is not None and self._sampling is not None:
            metric = self._sampling.metric
            whole = [group for group in groups if len(group.trainable) == len(group.trajectories) > 1]
            usable = [(group.prompt.prompt_id, group.trainable) for group in whole]  # a failure teaches nothing of it
            self._history.observe((name, [metric_of(one, metric) for one in found]) for name, found in usable)
        return [with_greedy_reward(group) for group in kept], dropped

    def measure_prompts(self) -> Metrics:
        """The history of prompts in figures; nothing without one."""
        return self._history.metrics() if self._history is not None else {}

    # ------------------------------------------------------------------------------------------------------ batches

    def advantages(self, batch: Batch, pretraining: bool = False) -> Batch:
        """The batch with token rewards, advantages and, with a critic, returns; called once per collected batch.

        Also takes rejected tokens out of the loss mask and moves the adaptive KL coefficient. While only the critic
        learns (`pretraining`), its returns are the plain sums of rewards, whatever lambda is set (VAPO, arXiv
        2504.05118, section 4.1), and the coefficient stays. Raises ValueError if a required field is missing.
        """
        if self._correction.old == "rollout":
            batch = batch.with_(old_logprobs=_field(batch.rollout_logprobs, "rollout_logprobs"))
        batch = self._with_is_weights(batch)
        batch = self._with_token_rewards(batch, adapt=not pretraining)
        settings = self._advantage
        if pretraining and isinstance(settings, GaeSettings):
            settings = settings.model_copy(update={"critic_lam": 1.0})
        result = self._estimator(batch, settings)
        batch = batch.with_(advantages=result.advantages, returns=result.returns)
        if self._resample is not None:
            repeats = resample(_field(batch.rewards, "rewards"), self._resample, self._batches)
            batch = _with_extra(batch, REPEATS, spread(repeats, batch.cu_seqlens))
        self._batches += 1
        return self._without_rejected(batch)

    def counts(self, minibatch: Batch) -> StepCounts:
        """What this part of an optimizer step counts; several ranks add theirs up and give the sum to `weigh`."""
        return step_counts(minibatch.loss_mask, minibatch.cu_seqlens, _per_sequence_repeats(minibatch))

    def weigh(self, minibatch: Batch, counts: StepCounts | None = None) -> Batch:
        """A mini-batch (one optimizer step, before any further cut) with its loss weights."""
        weights = loss_weights(
            minibatch.loss_mask, minibatch.cu_seqlens, self._aggregation, counts, _per_sequence_repeats(minibatch)
        )
        minibatch = minibatch.with_(loss_weights=weights)
        if self._selection:
            minibatch = _with_extra(minibatch, SELECTED, resolve(self._selection)(minibatch, self._loss))
        if self._nll_coef:
            minibatch = _with_extra(minibatch, POSITIVE, _positive_share(minibatch))
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
        """What is known of a batch after `advantages`: mismatch to the rollout, KL to the reference, critic's fit.

        Figures that cannot be known are left out; without old log-probs of the trainer, the objective measures the
        mismatch in its own forward.
        """
        mask = batch.loss_mask | batch.extras.get(REJECTED, torch.zeros_like(batch.loss_mask))
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
        if IS_WEIGHTS in batch.extras:
            weight = masked_mean(batch.extras[IS_WEIGHTS], mask)
            metrics["correction/weight"] = Metric.mean(weight.item(), int(mask.sum()))
        if self._correction.rejections:
            share = batch.extras[REJECTED].sum() / mask.sum().clamp(min=1)
            metrics["correction/rejected"] = Metric.mean(share.item(), int(mask.sum()))
        return metrics | _critic_fit(batch)

    # -------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """JSON-compatible."""
        state: dict[str, Any] = {"kl_coef": self._kl_coef, "batches": self._batches}
        return state | ({"prompts": self._history.state_dict()} if self._history is not None else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._kl_coef = float(state["kl_coef"])
        self._batches = int(state["batches"])
        if self._history is not None and "prompts" in state:  # absent where skipping was not on before
            self._history.load_state_dict(state["prompts"])

    # -------------------------------------------------------------------------------------------------------- parts

    @property
    def _selection(self) -> str:
        return str(getattr(self._loss, "selection", ""))

    def _with_is_weights(self, batch: Batch) -> Batch:
        """Weights now, if the old log-probs are known now; else the objective computes them from its own forward."""
        if self._correction.weights is None or batch.old_logprobs is None:
            return batch
        rollout = _field(batch.rollout_logprobs, "rollout_logprobs")
        weights = importance_weights(batch.old_logprobs, rollout, batch.loss_mask, batch.cu_seqlens, self._correction)
        if self._correction.normalize:
            weights = normalized(weights, batch.loss_mask)
        return _with_extra(batch, IS_WEIGHTS, weights)

    def _with_token_rewards(self, batch: Batch, adapt: bool) -> Batch:
        rewards = token_rewards(batch)
        if self._kl.where == "in_reward" and self._kl.coef > 0:
            old, ref = _field(batch.old_logprobs, "old_logprobs"), _field(batch.ref_logprobs, "ref_logprobs")
            kl = torch.where(batch.loss_mask, kl_penalty(old, ref, self._kl.kind), 0)
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
        if not self._correction.rejections:
            return batch
        old, rollout = _field(batch.old_logprobs, "old_logprobs"), _field(batch.rollout_logprobs, "rollout_logprobs")
        kept = accepted(old, rollout, batch.loss_mask, batch.cu_seqlens, self._correction.rejections)
        return _with_extra(batch, REJECTED, batch.loss_mask & ~kept).with_(loss_mask=kept)


def check_reward_shaping(config: AlgorithmConfig) -> None:
    """Raise ValueError if something is to be added to a reward that the estimator does not read, or cannot take."""
    advantage = config.advantage
    if config.kl.coef > 0 and config.kl.where == "in_reward":
        check_takes_token_rewards(advantage, "kl.where: in_reward")
    if config.overlong is None:
        return
    if not getattr(advantage, "any_rewards", True):
        raise ValueError(f"overlong: advantage {advantage.name} is for rewards of 0 and 1, and a penalty is neither")
    if isinstance(advantage, GdpoSettings) and OVERLONG not in advantage.weights:
        raise ValueError(
            f"overlong: advantage gdpo reads only the components that it weighs; add {OVERLONG!r} to weights"
        )


def check_takes_token_rewards(advantage: Choice, what: str) -> None:
    """Raise ValueError if the estimator does not read rewards that were put on tokens."""
    if isinstance(advantage, GdpoSettings):
        raise ValueError(f"{what}: advantage gdpo reads reward components, not rewards on tokens; use in_loss")
    if not getattr(advantage, "any_rewards", True):
        raise ValueError(f"{what}: advantage {advantage.name} is for rewards of 0 and 1; use in_loss")


def _resolved(config: AlgorithmConfig) -> AggregationSettings:
    """Mode null becomes what the loss's own paper averages over."""
    own: Mode = getattr(config.loss, "own_aggregation", "token_mean")
    return AggregationSettings(mode=config.aggregation.mode or own, norm_tokens=config.aggregation.norm_tokens)


def _take_all(settings: Config | None) -> None:
    """Count every setting of a part as read: its function reads them when it is called, which is after start-up."""
    for name in type(settings).model_fields if settings is not None else ():
        getattr(settings, name)


def _with_extra(batch: Batch, name: str, value: Tensor) -> Batch:
    return batch.with_(extras={**batch.extras, name: value})


def _per_sequence_repeats(batch: Batch) -> Tensor | None:
    if REPEATS not in batch.extras:
        return None
    return batch.extras[REPEATS][batch.cu_seqlens[:-1]]


def _positive_share(batch: Batch) -> Tensor:
    """For -log p averaged over the tokens of rewarded trajectories: loss tokens / their loss tokens on theirs, [T]."""
    positive = batch.loss_mask & (spread(_field(batch.rewards, "rewards"), batch.cu_seqlens) > 0)
    return positive * (batch.loss_mask.sum() / positive.sum().clamp(min=1))


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
