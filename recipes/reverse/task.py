"""Reverse three characters: the smallest task on which exact match from random weights proves every sign and offset."""

from __future__ import annotations

import random
from collections.abc import Iterator

ALPHABET = "abcdef"


def rows(seed: int, size: int, length: int = 3, alphabet: str = ALPHABET) -> Iterator[dict[str, str]]:
    """`size` random strings over six letters, each with its reverse as ground truth."""
    rng = random.Random(seed)
    for _ in range(size):
        text = "".join(rng.choices(alphabet, k=length))
        yield {"prompt": text, "ground_truth": text[::-1], "data_source": "reverse"}
