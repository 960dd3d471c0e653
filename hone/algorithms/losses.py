"""Policy losses: from log-probs and advantages to a loss per token.

Each is `loss(inputs, settings) -> LossOutput`. `rho` is the ratio of the current policy to the old one; importance
weights (rollout correction), where there are any, multiply the token's loss. No loss sees more than the sequences it
is given, so none depends on how the step was cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hone.algorithms.kl import LOG_RATIO_LIMIT
from hone.algorithms.segments import sequence_mean, spread
from hone.algorithms.settings import CispoSettings, ClipSettings, PolicyLossSettings, PpoSettings
from hone.types import LossOutput

SEQUENCE_LOG_RATIO_LIMIT = 10.0


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What a policy loss may look at: whole sequences, packed; every tensor [T] but `cu_seqlens`."""

    lp: Tensor  # current log-probs, with gradient
    old: Tensor  # log-probs the ratio is taken against
    advantages: Tensor
    mask: Tensor  # bool
    cu_seqlens: Tensor  # [N+1]
    is_weights: Tensor | None = None  # rollout correction, detached
    selected: Tensor | None = None  # bool, tokens picked over the whole mini-batch for losses that ask for it

    @property
    def log_ratio(self) -> Tensor:
        """lp - old, clamped to [-20, 20]; 0 outside the mask."""
        return torch.where(self.mask, self.lp - self.old, 0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def finish(inputs: LossInputs, values: Tensor, log_ratio: Tensor, **fractions: Tensor) -> LossOutput:
    """Apply mask and importance weights, and add the metrics that every policy loss has."""
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
    """The PPO surrogate [T], and which tokens the lower and the upper bound cut off."""
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
    """-lp: imitate, whatever the advantage."""
    return finish(inputs, -inputs.lp, inputs.log_ratio.detach())
