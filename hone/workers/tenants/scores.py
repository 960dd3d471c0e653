"""Distributions of the next token at each place of a prompt, as arrays."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

EMPTY_ID, EMPTY_LOGPROB = 0, -99999.0  # of a place in a table of likely tokens that has none


def whole(ids: NDArray[np.int64], logprobs: NDArray[np.float32]) -> NDArray[np.float32]:
    """[len - 1, V]: the log-prob of each token at each place but the first, from the likeliest V tokens of each."""
    found = np.empty((len(ids) - 1, ids.shape[1]), np.float32)
    np.put_along_axis(found, ids[1:], logprobs[1:], 1)
    return found


def drawn(
    logprobs: NDArray[np.float32], count: int, temperature: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Tokens drawn at each place from its distribution [len - 1, V] at a temperature, and their log-probs there."""
    scores = torch.log_softmax(torch.from_numpy(logprobs) / temperature, -1)
    generator = torch.Generator().manual_seed(seed % (1 << 63))
    ids = torch.multinomial(scores.exp(), count, replacement=True, generator=generator)
    return ids.numpy(), scores.gather(1, ids).numpy()


def likeliest(
    ids: NDArray[np.int64], logprobs: NDArray[np.float32], count: int, skipped: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The likeliest tokens at each place, [len, count]; the first `skipped` places have none."""
    first, likely = ids[:, :count].astype(np.int32), logprobs[:, :count].copy()
    first[:skipped], likely[:skipped] = EMPTY_ID, EMPTY_LOGPROB
    return first, likely


def looked_up(logprobs: NDArray[np.float32], ids: NDArray[np.int64], name: str) -> NDArray[np.float32]:
    """[len - 1, K]: the log-probs of K tokens at each place; 0 for the id -1. Raises ValueError for other ids."""
    if ids.max(initial=-1) >= logprobs.shape[1] or ids.min(initial=0) < -1:
        raise ValueError(f"{name}: ids are from 0 to {logprobs.shape[1] - 1}, and -1 asks for nothing")
    return np.where(ids < 0, np.float32(0), np.take_along_axis(logprobs, np.maximum(ids, 0), 1))
