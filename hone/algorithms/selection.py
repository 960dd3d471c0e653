"""Selection of tokens over a whole mini-batch, for losses that treat a few tokens differently from the rest.

Tokens are picked once per mini-batch, before it is cut into micro-batches, so the gradient does not depend on the cut.
The pick therefore uses the old log-probs; the paper's code (arXiv 2505.22617) uses the current micro-batch's. In the
first optimizer step of a batch they are equal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hone.algorithms.segments import masked_mean
from hone.algorithms.settings import ClipCovSettings, KlCovSettings, TopEntropySettings
from hone.types import Batch


def covariance(batch: Batch) -> Tensor:
    """(A - mean A) (log p - mean log p) of each loss token, [T] float64; 0 outside the mask.

    Raises ValueError without advantages or old log-probs.
    """
    if batch.advantages is None or batch.old_logprobs is None:
        raise ValueError("picking tokens by covariance needs Batch.advantages and Batch.old_logprobs")
    mask = batch.loss_mask
    advantages, logprobs = batch.advantages.double(), batch.old_logprobs.double()
    centred = (advantages - masked_mean(advantages, mask)) * (logprobs - masked_mean(logprobs, mask))
    return torch.where(mask, centred, 0)


def top_by_covariance(batch: Batch, settings: KlCovSettings) -> Tensor:
    """The `share` of loss tokens (at least one) with the largest covariance, [T] bool."""
    return _largest(covariance(batch), batch.loss_mask, _budget(batch.loss_mask, settings.share))


def random_by_covariance(batch: Batch, settings: ClipCovSettings) -> Tensor:
    """A random `share` of the loss tokens (at least one) out of those with cov_low < cov < cov_high, [T] bool."""
    cov = covariance(batch)
    candidates = batch.loss_mask & (cov > settings.cov_low) & (cov < settings.cov_high)
    return _largest(_lottery(batch), candidates, _budget(batch.loss_mask, settings.share))


def top_by_entropy(batch: Batch, settings: TopEntropySettings) -> Tensor:
    """The `share` of loss tokens (at least one) with the highest entropy, including ties, [T] bool.

    Raises ValueError without `batch.entropy`.
    """
    entropy = batch.entropy
    if entropy is None:
        raise ValueError("picking tokens by entropy needs Batch.entropy, from the forward before the update")
    found = entropy[batch.loss_mask]
    if not len(found):
        return batch.loss_mask
    return batch.loss_mask & (entropy >= found.topk(_budget(batch.loss_mask, settings.share)).values[-1])


def _budget(mask: Tensor, share: float) -> int:
    return max(int(share * int(mask.sum())), 1)


def _largest(values: Tensor, candidates: Tensor, count: int) -> Tensor:
    where = candidates.nonzero().squeeze(1)
    best = where[values[where].topk(min(count, len(where))).indices]
    picked = torch.zeros_like(candidates)
    picked[best] = True
    return picked


def _lottery(batch: Batch) -> Tensor:
    """A pseudo-random number per token, [T] float64.

    It is a hash of the token and its log-prob, so the pick does not depend on the packing order, and a resumed run
    needs no generator state.
    """
    assert batch.old_logprobs is not None  # covariance() has checked
    bits = batch.old_logprobs.float().contiguous().view(torch.int32).long()
    mixed = (batch.token_ids * 2654435761 + batch.position_ids * 40503 + bits) & 0x7FFFFFFF
    for _ in range(2):
        mixed = ((mixed ^ (mixed >> 15)) * 739982445) & 0x7FFFFFFF
    return (mixed ^ (mixed >> 16)).double()
