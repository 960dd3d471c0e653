"""Reverse three characters: a small task that a model learns only if every sign and offset is right."""

from __future__ import annotations

import random
from collections.abc import Iterator

ALPHABET = "abcdef"


def rows(seed: int, size: int, length: int = 3, alphabet: str = ALPHABET) -> Iterator[dict[str, str]]:
    """Yield `size` random strings of the alphabet, with their reverse as ground truth."""
    rng = random.Random(seed)
    for _ in range(size):
        text = "".join(rng.choices(alphabet, k=length))
        yield {"prompt": text, "ground_truth": text[::-1], "data_source": "reverse"}
