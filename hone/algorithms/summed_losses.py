"""Losses that are sums over tokens, as training services define them.

    r = exp(logprob - logprobs)        of a token, against the log-prob that it was sampled with

    cross_entropy          -weight * logprob                                (targets [N] or [N, K])
    importance_sampling    -r * advantage
    ppo                    -min(r * advantage, clip(r, low, high) * advantage)
    cispo                  -constant(clip(r, low, high)) * logprob * advantage
    dro                    -(logprob * advantage - beta / 2 * (logprob - logprobs)^2)
    gspo                   as ppo, where every token's r has the value of its sequence's: the geometric mean over the
                           tokens of `sequence_ratio_mask`

The inputs are `Batch.extras` under the protocol's names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hone.types import Batch

WEIGHTS, ADVANTAGES, LOGPROBS = "weights", "advantages", "logprobs"
LOW, HIGH, RATIO_MASK = "clip_low_threshold", "clip_high_threshold", "sequence_ratio_mask"


@dataclass(frozen=True, slots=True)
class LossRule:
    """One loss: its formula, the inputs that it needs, those that it may have, and its settings with their defaults."""

    formula: Callable[[Tensor, Batch, Mapping[str, float]], Tensor]  # log-probs [T] or [T, K] -> [T] or [T, K]
    needs: tuple[str, ...] = (ADVANTAGES, LOGPROBS)
    takes: tuple[str, ...] = ()
    settings: Mapping[str, float] = field(default_factory=dict)
    factor: str = ADVANTAGES  # the input with which a token's gradient is 0, too; empty: none


def _cross_entropy(logprobs: Tensor, batch: Batch, settings: Mapping[str, float]) -> Tensor:
    return -batch.extras[WEIGHTS] * logprobs


def _importance_sampling(logprobs: Tensor, batch: Batch, settings: Mapping[str, float]) -> Tensor:
    return -torch.exp(logprobs - batch.extras[LOGPROBS]) * batch.extras[ADVANTAGES]


def _ppo(logprobs: Tensor, batch: Batch, settings: Mapping[str, float]) -> Tensor:
    return _clipped(torch.exp(logprobs - batch.extras[LOGPROBS]), batch)


def _clipped(ratio: Tensor, batch: Batch) -> Tensor:
    advantages = batch.extras[ADVANTAGES]
    clipped = torch.clamp(ratio, batch.extras[LOW], batch.extras[HIGH])
    return -torch.minimum(ratio * advantages, clipped * advantages)


def _cispo(logprobs: Tensor, batch: Batch, settings: Mapping[str, float]) -> Tensor:
    ratio = torch.exp(logprobs.detach() - batch.extras[LOGPROBS])
    clipped = torch.clamp(ratio, batch.extras[LOW], batch.extras[HIGH])
    return -clipped * logprobs * batch.extras[ADVANTAGES]


def _dro(logprobs: Tensor, batch: Batch, settings: Mapping[str, float]) -> Tensor:
    distance = (logprobs - batch.extras[LOGPROBS]) ** 2
    return -(logprobs * batch.extras[ADVANTAGES] - 0.5 * settings["beta"] * distance)


def _gspo(logprobs: Tensor, batch: Batch, settings: Mapping[str, float]) -> Tensor:
    counted = (batch.extras[RATIO_MASK] != 0).to(logprobs.dtype)
    apart = (logprobs.detach() - batch.extras[LOGPROBS]) * counted
    number = torch.repeat_interleave(batch.lengths)
    zeros = logprobs.new_zeros(batch.num_sequences)
    sums, counts = zeros.index_add(0, number, apart), zeros.index_add(0, number, counted)
    mean = (sums / counts.clamp(min=1))[number]
    return _clipped(torch.exp(mean + logprobs - logprobs.detach()), batch)


CLIP = {LOW: 0.8, HIGH: 1.2}
LOSSES: Mapping[str, LossRule] = {
    "cross_entropy": LossRule(_cross_entropy, needs=(), takes=(WEIGHTS,), factor=WEIGHTS),
    "importance_sampling": LossRule(_importance_sampling),
    "ppo": LossRule(_ppo, takes=(LOW, HIGH), settings=CLIP),
    "cispo": LossRule(_cispo, takes=(LOW, HIGH), settings=CLIP),
    "dro": LossRule(_dro, settings={"beta": 0.05}, factor=""),
    "gspo": LossRule(_gspo, (ADVANTAGES, LOGPROBS, RATIO_MASK), takes=(LOW, HIGH), settings=CLIP),
}
