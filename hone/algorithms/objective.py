"""Objectives: the loss functions of an engine, (ModelOutput, Batch) -> LossOutput.

`needs` names the optional outputs of the forward that an objective reads. It returns a loss and metrics per token; the
engine multiplies the loss by `batch.loss_weights` and averages the metrics over loss tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hone.algorithms import POLICY_LOSSES
from hone.algorithms.correction import (
    IS_WEIGHTS,
    accepted,
    clamped_log_ratio,
    importance_weights,
    mismatch_largest,
    mismatch_sequences,
    mismatch_tokens,
)
from hone.algorithms.kl import kl_penalty
from hone.algorithms.losses import LossInputs
from hone.algorithms.own_parts import portable_settings
from hone.algorithms.segments import on_last_loss_token, spread
from hone.algorithms.settings import AlgorithmConfig, KlKind, ValueLossSettings
from hone.config import build
from hone.types import Batch, Extra, LossOutput, ModelOutput

# Per-token tensors that `Algorithm` puts into a batch for the objectives.
SELECTED = Extra("selected", filled_by="Algorithm.weigh")  # tokens of the mini-batch that the loss's `selection` picked
# factor of -log p that, times the loss weights, gives its mean over rewarded tokens
POSITIVE = Extra("positive_nll", filled_by="Algorithm.weigh")
FULL_KL = "full_kl"  # of ModelOutput.extras: exact KL to the reference


class PolicyObjective:
    """Policy loss + KL to the reference (with `where: in_loss`) - entropy bonus.

    The ratio's denominator is `batch.old_logprobs`. Without them it is the current policy, which gives the same numbers
    with one optimizer step per batch.
    """

    def __init__(self, settings: AlgorithmConfig) -> None:
        self._loss: Callable[[LossInputs, Any], LossOutput] = POLICY_LOSSES.get(settings.loss.name)
        self._settings = settings.loss
        self.config = settings
        self._selects = bool(settings.loss.selection)
        self._correction = settings.correction
        self._rejections = settings.correction.rules("current")
        self._entropy_coef = settings.entropy_coef
        self._nll_coef = settings.positive_nll_coef
        penalty = settings.penalty
        kl = penalty if penalty.coef > 0 and penalty.where == "in_loss" else None
        self._kl_coef = kl.coef if kl else 0.0
        self._kl_kind: KlKind = kl.kind if kl else "k3"
        full = {FULL_KL} if self._kl_kind == "full" else set()
        self.needs: frozenset[str] = frozenset({"entropy"} | full)
        others = self._kl_coef or self._entropy_coef or self._nll_coef  # they have a gradient of their own
        self.zero_without_advantage = settings.loss.zero_without_advantage and not others

    def __call__(self, output: ModelOutput, batch: Batch) -> LossOutput:
        """Compute the loss. Raises ValueError if batch or output lack a field that the settings need."""
        lp = present(output.logprobs, "ModelOutput.logprobs")
        mask = batch.loss_mask
        old = lp.detach() if batch.old_logprobs is None else batch.old_logprobs
        inputs = LossInputs(
            lp=lp,
            old=old,
            advantages=present(batch.advantages, "Batch.advantages"),
            mask=mask,
            cu_seqlens=batch.cu_seqlens,
            is_weights=self._is_weights(old, batch),
            selected=SELECTED.needed(batch) if self._selects else None,
        )
        policy = self._loss(inputs, self._settings)
        values, metrics = policy.values, dict(policy.metrics)
        if self._rejections:
            rollout = present(batch.rollout_logprobs, "Batch.rollout_logprobs")
            kept = accepted(lp.detach(), rollout, mask, batch.cu_seqlens, self._rejections, inputs.advantages)
            values = torch.where(kept, values, 0)
            metrics |= {"train/policy_loss": values.detach(), "correction/masked": (mask & ~kept).to(values.dtype)}
        if self._kl_coef:
            penalty = torch.where(mask, self._penalty(lp, output, batch), 0)
            values = values + self._kl_coef * penalty
            metrics["train/kl_loss"] = penalty.detach()
        if self._entropy_coef:
            values = values - self._entropy_coef * present(output.entropy, "ModelOutput.entropy")
        if self._nll_coef:
            values = values - self._nll_coef * POSITIVE.needed(batch) * lp
        if output.entropy is not None:
            metrics["train/entropy"] = output.entropy.detach()
        unmeasured = batch.old_logprobs is None or self._correction.old == "rollout"  # else `Algorithm.measure` did it
        if unmeasured and batch.rollout_logprobs is not None:
            gap = self._gap(lp, batch.rollout_logprobs, batch)
            return LossOutput(torch.where(mask, values, 0), {**metrics, **gap.metrics}, gap.counted, gap.largest)
        return LossOutput(torch.where(mask, values, 0), metrics)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Let another process load a loss from the user's file itself: a class in it has no module to import."""
        portable = portable_settings(self.config)
        return (_loaded, (portable,)) if portable else super().__reduce_ex__(protocol)

    def _gap(self, lp: Tensor, rollout: Tensor, batch: Batch) -> LossOutput:
        """Metrics of the gap between the rollout and the current policy."""
        mask, cu_seqlens = batch.loss_mask, batch.cu_seqlens
        old = lp.detach()
        log_ratio = clamped_log_ratio(old, rollout, mask)
        of_sequences = mismatch_sequences(log_ratio, old, rollout, mask, cu_seqlens)
        last = on_last_loss_token(torch.ones(batch.num_sequences, device=lp.device), mask, cu_seqlens).bool()
        return LossOutput(
            lp,
            mismatch_tokens(log_ratio, self._correction.band)
            | {name: spread(values, cu_seqlens) for name, values in of_sequences.items()},
            dict.fromkeys(of_sequences, last),
            mismatch_largest(log_ratio),
        )

    def _penalty(self, lp: Tensor, output: ModelOutput, batch: Batch) -> Tensor:
        if self._kl_kind == "full":
            return present(output.extras.get(FULL_KL), f"ModelOutput.extras[{FULL_KL!r}]")
        return kl_penalty(lp, present(batch.ref_logprobs, "Batch.ref_logprobs"), self._kl_kind)

    def _is_weights(self, old: Tensor, batch: Batch) -> Tensor | None:
        if self._correction.weights is None:
            return None
        known = IS_WEIGHTS.of(batch)
        if known is not None:
            return known
        rollout = present(batch.rollout_logprobs, "Batch.rollout_logprobs")
        return importance_weights(old, rollout, batch.loss_mask, batch.cu_seqlens, self._correction)


def _loaded(settings: dict[str, Any]) -> PolicyObjective:
    return PolicyObjective(build(AlgorithmConfig, settings, "algorithm"))


class ValueObjective:
    """0.5 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2), the critic's clipped regression, arXiv 1707.06347."""

    needs: frozenset[str] = frozenset()

    def __init__(self, settings: ValueLossSettings) -> None:
        self._clip = settings.clip

    def __call__(self, output: ModelOutput, batch: Batch) -> LossOutput:
        values = present(output.values, "ModelOutput.values")
        returns = present(batch.returns, "Batch.returns")
        error = (values - returns).square()
        clipped = torch.zeros_like(batch.loss_mask)
        if self._clip is not None:
            old = present(batch.values, "Batch.values")
            near = (values.clamp(old - self._clip, old + self._clip) - returns).square()
            clipped = near > error
            error = torch.maximum(error, near)
        loss = torch.where(batch.loss_mask, 0.5 * error, 0)
        metrics = {
            "critic/value_loss": loss.detach(),
            "critic/clip_fraction": clipped.to(values.dtype),
            "critic/value": values.detach(),
            "critic/return": returns,
        }
        return LossOutput(loss, metrics)


class SftObjective:
    """-log p of every loss token: supervised fine-tuning."""

    needs: frozenset[str] = frozenset()

    def __call__(self, output: ModelOutput, batch: Batch) -> LossOutput:
        lp = present(output.logprobs, "ModelOutput.logprobs")
        loss = torch.where(batch.loss_mask, -lp, 0)
        return LossOutput(loss, {"train/nll": loss.detach()})


def present(value: Tensor | None, name: str) -> Tensor:
    """Return the value, or raise ValueError naming the missing field."""
    if value is None:
        raise ValueError(f"{name} is missing, and this objective needs it")
    return value
