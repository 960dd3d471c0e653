"""More policy losses, of the same shape as those in `losses.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.algorithms.losses import LossInputs, clipped_objective, finish, reinforce
from hone.algorithms.segments import sequence_mean, spread
from hone.algorithms.settings import (
    ClipCovSettings,
    DppoKlSettings,
    DppoTvSettings,
    DroSettings,
    GmpoSettings,
    KlCovSettings,
    PolicyLossSettings,
    SapoSettings,
)
from hone.types import LossOutput


def sapo(inputs: LossInputs, settings: SapoSettings) -> LossOutput:
    """-A (4 / tau) sigmoid(tau (rho - 1)): a soft gate in place of a clip, arXiv 2511.20347."""
    log_ratio = inputs.log_ratio
    positive = inputs.advantages > 0
    tau = torch.where(positive, settings.tau_positive, settings.tau_negative).to(log_ratio.dtype)
    gate = 4 / tau * torch.sigmoid(tau * (log_ratio.exp() - 1))
    return finish(inputs, -gate * inputs.advantages, log_ratio)


def dppo_tv(inputs: LossInputs, settings: DppoTvSettings) -> LossOutput:
    """-A sg(min(rho, c)) lp for tokens whose probability has not moved too far already, arXiv 2602.04879.

    A token is left out where p - p_old > high and A > 0, or p - p_old < -low and A <= 0.
    """
    moved = inputs.lp.detach().exp() - inputs.old.exp()
    high = (inputs.advantages > 0) & (moved > settings.clip_high)
    low = (inputs.advantages <= 0) & (moved < -settings.clip_low)
    return _truncated(inputs, settings.truncate, low, high)


def dppo_kl(inputs: LossInputs, settings: DppoKlSettings) -> LossOutput:
    """The same, bounded by the Bernoulli KL(p_old, p) of the token; moving back towards p_old is always allowed."""
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

    A token's log-ratio is clamped to [-low, high] on the side where A would push it further. The sequence's value is
    put on all of its tokens, and its A is their mean.
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

    Which ones: `selection.random_by_covariance`, over the whole mini-batch.
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

    Which ones: `selection.top_by_covariance`, over the whole mini-batch.
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
    """-lp A: the plain policy gradient of GPG, whose scale is in its advantages, arXiv 2504.02546."""
    return reinforce(inputs, settings)


def _selected(inputs: LossInputs) -> Tensor:
    if inputs.selected is None:
        raise ValueError("this loss needs LossInputs.selected, the tokens picked over the whole mini-batch")
    return inputs.selected
