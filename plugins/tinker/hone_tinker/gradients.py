"""Any loss of log-probs as weights of tokens.

A service computes the gradient of sum(-weight x log-prob). A loss L that depends on the weights of the model through
the log-probs of tokens named beforehand only (the batch's own, and K others at each place, `Batch.ids_at`) has the
gradient sum(dL/d log-prob x gradient of log-prob), so with weight = -dL/d log-prob the service's gradient is that of L.
No other loss can be expressed, and none needs to be known.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hone.engines.engine import ScoredStep
from hone.types import Batch, LossFn, ModelOutput

NOT_RETURNED = "services return the log-probs of tokens only"
AT = "logprobs_at"  # what a loss needs that reads the log-probs of `Batch.ids_at`


def check_needs(loss: LossFn) -> None:
    """Raise ValueError for a loss that reads more of a forward than log-probs (and entropy, for a metric)."""
    wanted = sorted(map(str, getattr(loss, "needs", frozenset()) - {"entropy", AT}))
    if wanted:
        raise ValueError(f"the loss needs {', '.join(wanted)} of a forward, and {NOT_RETURNED}")


def targets(loss: LossFn, batch: Batch) -> Tensor:
    """The tokens whose log-probs a loss reads: the batch's own [T], or with K others at each place [T, 1 + K]."""
    if AT not in getattr(loss, "needs", frozenset()):
        return batch.token_ids
    if batch.ids_at is None:
        raise ValueError("Batch.ids_at is missing: the loss reads the log-probs of these tokens")
    return torch.cat([batch.token_ids[:, None], batch.ids_at], dim=1)


def token_weights(loss: LossFn, batch: Batch, logprobs: Tensor) -> tuple[Tensor, ScoredStep]:
    """-dL/d log-prob of each of the `targets` at these log-probs [T] or [T, 1 + K], and the loss with its metrics."""
    at = logprobs.detach().clone().requires_grad_()
    step = ScoredStep(loss, None)
    try:
        read = ModelOutput(logprobs=at) if at.dim() == 1 else ModelOutput(logprobs=at[:, 0], extras={AT: at[:, 1:]})
        total = step.total(read, batch)
    except ValueError as error:
        if "ModelOutput." not in str(error):
            raise
        raise ValueError(f"{error}, but {NOT_RETURNED}; for an entropy bonus, set algorithm.entropy_coef=0") from error
    if not total.requires_grad:
        return torch.zeros_like(logprobs), step
    (gradient,) = torch.autograd.grad(total, at)
    return -gradient, step


def fixed_weights(loss: LossFn, batch: Batch) -> Tensor | None:
    """The weights of a loss for which they do not depend on the log-probs (one update per batch, SFT); else None."""
    if AT in getattr(loss, "needs", frozenset()):
        return None
    first: Tensor | None = None
    for logprobs in probed_logprobs(batch):
        weights, _ = token_weights(loss, batch, logprobs)
        if first is not None and not torch.equal(first, weights):
            return None
        first = weights
    return first


def probed_logprobs(batch: Batch) -> Iterator[Tensor]:
    """Log-probs [T] to compare two losses at: those of the rollout, then others near and far from them.

    Tokens move by their own amounts, because differences of sequences, as in DPO, do not change if all move alike; and
    alike, because a mean over a long sequence, as in a rejection rule, hardly changes otherwise.
    """
    mask = batch.loss_mask
    start = batch.rollout_logprobs if batch.rollout_logprobs is not None else torch.full(mask.shape, -1.0)
    generator = torch.Generator().manual_seed(0)
    for size, shift in ((0.0, 0.0), (0.75, 0.0), (0.01, 0.0), (0.0, 5.0), (0.0, -5.0)):
        yield (start.float() + shift + size * torch.randn(mask.shape, generator=generator)) * mask
