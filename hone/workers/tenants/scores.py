"""Distributions of the next token at each place of a prompt, as arrays."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


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
