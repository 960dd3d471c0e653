"""From logits to tokens: filters, one uniform number per token, inverse of the cumulative distribution.

    logits / temperature -> top-k -> top-p -> min-p -> probabilities -> cumulative sum -> first token above u * total

`u` depends only on the request's seed and the token's position in its sequence. So a request's tokens do not depend on
the batch, the order or the slots, and a request that is resent with its first tokens continues as if never interrupted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.spans import running_sums

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27))
_TOP_P_FIRST_LOOK = 1024  # tokens to try before sorting the whole vocabulary


def stream_of(seed: int) -> np.uint64:
    """Return the start of a request's random stream; any integer is a valid seed."""
    return np.uint64(_mix(np.array([seed % 2**64], dtype=np.uint64))[0])


def uniforms(streams: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return [n] numbers in [0, 1), multiples of 2**-24: splitmix64 (Steele et al. 2014) of stream and position."""
    mixed = _mix(streams + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (mixed >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> _SHIFTS[0])) * _MULTIPLIERS[0]
    x = (x ^ (x >> _SHIFTS[1])) * _MULTIPLIERS[1]
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Rules:
    """Sampling parameters of each row of a batch; arrays are [n], on the host."""

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]


def sample(logits: Tensor, rules: Rules, u: NDArray[np.float32]) -> tuple[Tensor, Tensor]:
    """Sample tokens [n] int64 with log-probs [n] float32 from logits [n, V] (float32, may be overwritten).

    Log-probs are of the distribution sampled from. Greedy rows (temperature 0) give the model's log-prob at temperature
    1, as vLLM does. A row with non-finite logits gives a non-finite log-prob, which the caller refuses.
    """
    device = logits.device
    greedy = rules.temperature == 0
    if not np.all(greedy | (rules.temperature == 1)):
        logits = logits / _to(np.where(greedy, np.float32(1), rules.temperature), device)[:, None]
    filtered = ~greedy & ((rules.top_k > 0) | (rules.top_p < 1) | (rules.min_p > 0))
    if filtered.any():
        logits = _filter_rows(logits, rules, np.flatnonzero(filtered))
    probabilities = torch.softmax(logits, -1)
    if greedy.all():
        tokens = logits.argmax(-1)
    else:
        tokens = _invert(probabilities, _to(u, device))
        if greedy.any():
            tokens = torch.where(_to(greedy, device), logits.argmax(-1), tokens)
    return tokens, probabilities.gather(1, tokens[:, None])[:, 0].log_()


def _invert(probabilities: Tensor, u: Tensor) -> Tensor:
    """Return [n]: the first token whose cumulative probability exceeds u; never one of probability 0."""
    cumulative = running_sums(probabilities)
    total = cumulative[:, -1:]
    threshold = torch.minimum(u[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    tokens.clamp_(max=probabilities.shape[1] - 1)  # out of range only where the row is not finite
    if probabilities.device.type == "cpu":
        return tokens
    # A GPU adds in another order at each place, so a sum can grow in its last bit where the probability is 0.
    drawn = probabilities.gather(1, tokens[:, None])[:, 0]
    return torch.where(drawn > 0, tokens, probabilities.argmax(-1))


def _filter_rows(logits: Tensor, rules: Rules, rows: NDArray[np.int64]) -> Tensor:
    """Set excluded tokens of the filtered rows to -inf; leave the other rows unchanged.

    Tokens that tie with the last one kept are kept too, so the result does not depend on sort order.
    """
    index = _to(rows, logits.device)
    kept = logits[index]
    for wanted, one_filter in (
        (np.where(rules.top_k < logits.shape[1], rules.top_k, 0)[rows], _top_k),
        (np.where(rules.top_p < 1, rules.top_p, 0)[rows], _top_p),
        (rules.min_p[rows], _min_p),
    ):
        chosen = np.flatnonzero(wanted)
        if len(chosen) == len(rows):
            kept = one_filter(kept, _to(wanted, logits.device))
        elif len(chosen):
            some = _to(chosen, logits.device)
            kept[some] = one_filter(kept[some], _to(wanted[chosen], logits.device))
    logits[index] = kept
    return logits


def _top_k(logits: Tensor, k: Tensor) -> Tensor:
    largest = torch.topk(logits, int(k.max()), dim=-1).values
    return logits.masked_fill(logits < largest.gather(1, k[:, None] - 1), float("-inf"))


def _top_p(logits: Tensor, p: Tensor) -> Tensor:
    """Keep the smallest set of likeliest tokens whose probability reaches p: the sum before each is below p."""
    probabilities = torch.softmax(logits, -1)
    wanted = p[:, None]
    ordered = torch.topk(probabilities, min(_TOP_P_FIRST_LOOK, logits.shape[1]), dim=-1).values
    if bool((ordered.sum(-1, keepdim=True) < wanted).any()):
        ordered = torch.sort(probabilities, dim=-1, descending=True).values
    before = running_sums(ordered) - ordered
    last_kept = (before < wanted).sum(-1, keepdim=True).clamp_(min=1) - 1
    return logits.masked_fill(probabilities < ordered.gather(1, last_kept), float("-inf"))


def _min_p(logits: Tensor, fraction: Tensor) -> Tensor:
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + fraction.log()[:, None], float("-inf"))


def _to(array: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
