"""Losses of the service that are exactly the run's: one request then gives log-probs and gradient.

A service's loss is a sum over tokens. hone multiplies each token's loss by weights of aggregation and correction, which
are never negative, so they can be part of the advantages: w max(-A r, -A clip(r)) = max(-(w A) r, -(w A) clip(r)).
`ppo`, `cispo` and `gspo` are therefore sent by name with every aggregation and correction. `dro` is not: the service's
has its penalty on the tokens of the prompt too. No loss of hone is `importance_sampling`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hone.algorithms.correction import IS_WEIGHTS, importance_weights
from hone.algorithms.objective import PolicyObjective
from hone.algorithms.settings import CispoSettings, GspoSettings, PpoSettings
from hone.algorithms.summed_losses import ADVANTAGES, HIGH, LOGPROBS, LOSSES, LOW, RATIO_MASK
from hone.types import Batch, LossFn
from hone_tinker.gradients import probed_logprobs, token_weights
from hone_tinker.messages import ServiceLoss

RELATIVE, OF_LARGEST = 1e-4, 1e-6  # rounding of a weight in float32


def named_loss(loss: LossFn, batch: Batch) -> ServiceLoss | None:
    """The service's loss with the gradient of `loss`, or None if none has it: it is compared at several log-probs."""
    found = _candidate(loss, batch)
    if found is None:
        return None
    for logprobs in probed_logprobs(batch):
        weights, _ = token_weights(loss, batch, logprobs)
        if differ(weights - named_weights(found, batch, logprobs), weights):
            return None
    return found


def named_weights(loss: ServiceLoss, batch: Batch, logprobs: Tensor) -> Tensor:
    """-d loss / d log-prob of each token, as the service computes it at these log-probs [T]."""
    at = logprobs.detach().clone().requires_grad_()
    inputs = {name: values for name, values in loss.inputs.items() if name != "target_tokens"}
    bounds = {name: torch.full(at.shape, value) for name, value in loss.settings.items()}
    values = LOSSES[loss.name].formula(at, batch.with_(extras={**inputs, **bounds}), loss.settings)
    (gradient,) = torch.autograd.grad(values[batch.loss_mask].sum(), at)
    return -gradient


def differ(rest: Tensor, weights: Tensor) -> bool:
    """Return whether weights differ from others by more than rounding; `rest` is the difference."""
    return bool((rest.abs() > RELATIVE * weights.abs() + OF_LARGEST * weights.abs().max()).any())


def _candidate(loss: LossFn, batch: Batch) -> ServiceLoss | None:
    if not isinstance(loss, PolicyObjective) or batch.old_logprobs is None or batch.loss_weights is None:
        return None
    settings, mask = loss.config.loss, batch.loss_mask
    if type(settings) not in (PpoSettings, CispoSettings, GspoSettings):  # their names are the service's
        return None
    scale = batch.loss_weights
    correction = loss.config.correction
    if correction.weights is not None:
        known, rollout = IS_WEIGHTS.of(batch), batch.rollout_logprobs
        if known is None and rollout is not None:
            known = importance_weights(batch.old_logprobs, rollout, mask, batch.cu_seqlens, correction)
        scale = scale if known is None else scale * known
    if batch.advantages is None or bool((scale[mask] < 0).any()):
        return None
    inputs = {
        "target_tokens": batch.token_ids,
        ADVANTAGES: torch.where(mask, batch.advantages * scale, 0).float(),
        LOGPROBS: torch.where(mask, batch.old_logprobs, 0).float(),
    }
    if settings.name == "gspo":
        inputs[RATIO_MASK] = mask.float()
    return ServiceLoss(settings.name, inputs, {LOW: 1 - settings.clip_low, HIGH: 1 + settings.clip_high})
