"""Policy losses: from log-probs and advantages to a loss per token.

Each is `loss(inputs, settings) -> LossOutput`. `rho` is the ratio of the current policy to the old one. Importance
weights of the rollout correction multiply the token's loss. A loss reads whole sequences only and nothing across them,
so it does not depend on how the step is cut into micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hone.algorithms import POLICY_LOSSES
from hone.algorithms.kl import LOG_RATIO_LIMIT
from hone.algorithms.segments import sequence_mean, spread
from hone.algorithms.settings import (
    CispoSettings,
    ClipCovSettings,
    ClipSettings,
    DppoKlSettings,
    DppoTvSettings,
    DroSettings,
    GmpoSettings,
    KlCovSettings,
    PolicyLossSettings,
    PpoSettings,
    SapoSettings,
    TopEntropySettings,
)
from hone.types import LossOutput

SEQUENCE_LOG_RATIO_LIMIT = 10.0


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Inputs of a policy loss: whole sequences, packed; every tensor is [T] except `cu_seqlens`."""

    lp: Tensor  # current log-probs, with gradient
    old: Tensor  # old log-probs, the denominator of the ratio
    advantages: Tensor
    mask: Tensor  # bool
    cu_seqlens: Tensor  # [N+1]
    is_weights: Tensor | None = None  # rollout correction, detached
    selected: Tensor | None = None  # bool, tokens picked over the whole mini-batch, for losses with a `selection`

    @property
    def log_ratio(self) -> Tensor:
        """lp - old, clamped to [-20, 20]; 0 outside the mask."""
        return torch.where(self.mask, self.lp - self.old, 0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def finish(inputs: LossInputs, values: Tensor, log_ratio: Tensor, **fractions: Tensor) -> LossOutput:
    """Apply mask and importance weights, and add the metrics of every policy loss."""
    if inputs.is_weights is not None:
        values = values * torch.where(inputs.mask, inputs.is_weights, 0)
    values = torch.where(inputs.mask, values, 0)
    with torch.no_grad():
        ratio = log_ratio.exp()
        metrics = {
            "train/policy_loss": values.detach(),
            "train/ratio": ratio,
            "train/approx_kl": ratio - log_ratio - 1,
            **{f"train/{name}": share.to(values.dtype) for name, share in fractions.items()},
        }
    return LossOutput(values, metrics)


def ppo(inputs: LossInputs, settings: PpoSettings) -> LossOutput:
    """max(-A rho, -A clip(rho, 1 - low, 1 + high)), arXiv 1707.06347.

    `dual_clip` c also bounds the loss by -A c where A < 0 (arXiv 1912.09729). A clipped token has no gradient.
    """
    log_ratio = inputs.log_ratio
    values, low, high = clipped_objective(log_ratio.exp(), inputs.advantages, settings)
    if settings.dual_clip is None:
        return finish(inputs, values, log_ratio, clip_fraction_low=low, clip_fraction_high=high)
    bound = -inputs.advantages * settings.dual_clip
    dual = (inputs.advantages < 0) & (values > bound)
    values = torch.where(dual, bound, values)
    return finish(inputs, values, log_ratio, clip_fraction_low=low, clip_fraction_high=high, clip_fraction_dual=dual)


def clipped_objective(ratio: Tensor, advantages: Tensor, settings: ClipSettings) -> tuple[Tensor, Tensor, Tensor]:
    """The PPO surrogate [T], and the tokens clipped by the lower and by the upper bound."""
    floor, ceiling = 1 - settings.clip_low, 1 + settings.clip_high
    values = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(floor, ceiling))
    return values, (advantages < 0) & (ratio < floor), (advantages > 0) & (ratio > ceiling)


def reinforce(inputs: LossInputs, settings: PolicyLossSettings) -> LossOutput:
    """-A lp: the plain policy gradient, without a ratio."""
    return finish(inputs, -inputs.advantages * inputs.lp, inputs.log_ratio.detach())


def gspo(inputs: LossInputs, settings: ClipSettings) -> LossOutput:
    """PPO on the sequence's ratio exp(mean(lp - old)), arXiv 2507.18071; its log is bounded by 10.

    Each token carries the sequence's ratio as value and its own log-prob as gradient (GSPO-token).
    """
    log_ratio = inputs.log_ratio.detach()
    of_sequence = spread(sequence_mean(log_ratio, inputs.mask, inputs.cu_seqlens), inputs.cu_seqlens)
    carried = torch.where(inputs.mask, inputs.lp - inputs.lp.detach() + of_sequence, 0)
    carried = carried.clamp(max=SEQUENCE_LOG_RATIO_LIMIT)
    values, low, high = clipped_objective(carried.exp(), inputs.advantages, settings)
    return finish(inputs, values, carried.detach(), clip_fraction_low=low, clip_fraction_high=high)


def cispo(inputs: LossInputs, settings: CispoSettings) -> LossOutput:
    """-sg(clip(rho, 1 - low, 1 + high)) A lp: every token keeps a gradient, arXiv 2506.13585."""
    log_ratio = inputs.log_ratio.detach()
    ratio = log_ratio.exp()
    floor, ceiling = 1 - settings.clip_low, 1 + settings.clip_high
    values = -ratio.clamp(floor, ceiling) * inputs.advantages * inputs.lp
    return finish(inputs, values, log_ratio, clip_fraction_low=ratio < floor, clip_fraction_high=ratio > ceiling)


def sft(inputs: LossInputs, settings: PolicyLossSettings) -> LossOutput:
    """-lp: imitation, independent of the advantage."""
    return finish(inputs, -inputs.lp, inputs.log_ratio.detach())


def sapo(inputs: LossInputs, settings: SapoSettings) -> LossOutput:
    """-A (4 / tau) sigmoid(tau (rho - 1)): a soft gate instead of a clip, arXiv 2511.20347."""
    log_ratio = inputs.log_ratio
    positive = inputs.advantages > 0
    tau = torch.where(positive, settings.tau_positive, settings.tau_negative).to(log_ratio.dtype)
    gate = 4 / tau * torch.sigmoid(tau * (log_ratio.exp() - 1))
    return finish(inputs, -gate * inputs.advantages, log_ratio)


def dppo_tv(inputs: LossInputs, settings: DppoTvSettings) -> LossOutput:
    """-A sg(min(rho, c)) lp, without tokens whose probability moved too far already, arXiv 2602.04879.

    These are the tokens with p - p_old > high and A > 0, or p - p_old < -low and A <= 0.
    """
    moved = inputs.lp.detach().exp() - inputs.old.exp()
    high = (inputs.advantages > 0) & (moved > settings.clip_high)
    low = (inputs.advantages <= 0) & (moved < -settings.clip_low)
    return _truncated(inputs, settings.truncate, low, high)


def dppo_kl(inputs: LossInputs, settings: DppoKlSettings) -> LossOutput:
    """`dppo_tv`, bounded by the token's Bernoulli KL(p_old, p) instead; a token may always move back towards p_old."""
    p, p_old = inputs.lp.detach().exp(), inputs.old.exp()
    nearly_one = 1 - 1e-7
    rest = torch.log1p(-p_old.clamp(max=nearly_one)) - torch.log1p(-p.clamp(max=nearly_one))
    far = p_old * (inputs.old - inputs.lp.detach()) + (1 - p_old) * rest > settings.threshold
    high = far & (inputs.advantages > 0) & (p > p_old)
    low = far & (inputs.advantages <= 0) & (p < p_old)
    return _truncated(inputs, settings.truncate, low, high)


def _truncated(inputs: LossInputs, ceiling: float, low: Tensor, high: Tensor) -> LossOutput:
    log_ratio = inputs.log_ratio.detach()
    weight = log_ratio.exp().clamp(max=ceiling) * ~(low | high)
    values = -inputs.advantages * weight * inputs.lp
    return finish(inputs, values, log_ratio, clip_fraction_low=low, clip_fraction_high=high)


def gmpo(inputs: LossInputs, settings: GmpoSettings) -> LossOutput:
    """-A times the geometric mean of the sequence's clamped ratios, arXiv 2507.20673.

    A token's log-ratio is clamped to [-low, high] on the side where A would push it further. All tokens of a sequence
    get its value, computed with their mean A.
    """
    log_ratio = inputs.log_ratio
    sign = inputs.advantages.sign()
    clamped = log_ratio.clamp(-settings.clip_low, settings.clip_high)
    bounded = sign * torch.minimum(sign * log_ratio, sign * clamped)
    ratio = sequence_mean(bounded, inputs.mask, inputs.cu_seqlens).exp()
    values = -sequence_mean(inputs.advantages, inputs.mask, inputs.cu_seqlens) * ratio
    low = (inputs.advantages < 0) & (log_ratio < -settings.clip_low)
    high = (inputs.advantages > 0) & (log_ratio > settings.clip_high)
    return finish(inputs, spread(values, inputs.cu_seqlens), log_ratio, clip_fraction_low=low, clip_fraction_high=high)


def clip_cov(inputs: LossInputs, settings: ClipCovSettings) -> LossOutput:
    """PPO in which a few tokens of high covariance get no loss, to keep entropy, arXiv 2505.22617.

    `selection.random_by_covariance` picks them over the whole mini-batch.
    """
    log_ratio, picked = inputs.log_ratio, _selected(inputs)
    values, low, high = clipped_objective(log_ratio.exp(), inputs.advantages, settings)
    left_out = picked & ~low & ~high
    values = torch.where(left_out, 0, values)
    return finish(
        inputs, values, log_ratio, clip_fraction_low=low, clip_fraction_high=high, covariance_fraction=left_out
    )


def kl_cov(inputs: LossInputs, settings: KlCovSettings) -> LossOutput:
    """-A rho, plus coef |lp - old| on the tokens of the highest covariance, arXiv 2505.22617.

    `selection.top_by_covariance` picks them over the whole mini-batch.
    """
    log_ratio, picked = inputs.log_ratio, _selected(inputs)
    penalty = torch.where(picked, settings.coef * log_ratio.abs(), 0)
    values = -inputs.advantages * log_ratio.exp() + penalty
    return finish(inputs, values, log_ratio, covariance_fraction=picked)


def dro(inputs: LossInputs, settings: DroSettings) -> LossOutput:
    """-(lp A - beta/2 (lp - old)^2): a quadratic penalty holds the policy near the old one, arXiv 2405.19107."""
    log_ratio = inputs.log_ratio
    values = -(inputs.lp * inputs.advantages - settings.beta / 2 * log_ratio.square())
    return finish(inputs, values, log_ratio.detach())


def gpg(inputs: LossInputs, settings: PolicyLossSettings) -> LossOutput:
    """-lp A: the plain policy gradient of GPG, whose advantages carry the scale, arXiv 2504.02546."""
    return reinforce(inputs, settings)


def top_entropy(inputs: LossInputs, settings: TopEntropySettings) -> LossOutput:
    """Another loss on the tokens of the highest entropy, where reasoning branches, arXiv 2506.01939.

    `selection.top_by_entropy` picks them over the whole mini-batch. Other tokens count in the denominators with loss 0.
    """
    picked = _selected(inputs)
    inner: LossOutput = POLICY_LOSSES.get(settings.loss.name)(inputs, settings.loss)
    values = torch.where(picked, inner.values, 0)
    metrics = {"train/policy_loss": values.detach(), "train/entropy_fraction": picked.to(values.dtype)}
    return replace(inner, values=values, metrics={**inner.metrics, **metrics})


def _selected(inputs: LossInputs) -> Tensor:
    if inputs.selected is None:
        raise ValueError("this loss needs LossInputs.selected, the tokens picked over the whole mini-batch")
    return inputs.selected
