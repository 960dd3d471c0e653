"""Texts that are to be read forward or backward: a base model that learns from these rows knows both."""

from __future__ import annotations

import random
from collections.abc import Iterator

ALPHABET = "abcdef"


def rows(seed: int, size: int, length: int = 3) -> Iterator[dict[str, str]]:
    """Yield `size` random strings; the ground truth is the same string, or its reverse, with equal chance."""
    rng = random.Random(seed)
    for _ in range(size):
        text = "".join(rng.choices(ALPHABET, k=length))
        yield {"prompt": text, "ground_truth": text[:: rng.choice((1, -1))], "data_source": "reverse"}
