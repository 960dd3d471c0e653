"""Sort letters up or down. The rejected answer has the other order, or two neighbours swapped."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

LETTERS = "abcdefghij"


def pairs(seed: int, size: int, length: int = 5) -> Iterator[dict[str, str]]:
    """Yield `size` comparisons such as "down decab": "edcba" is preferred to "abcde" or "ecdba"."""
    rng = random.Random(seed)
    for _ in range(size):
        word = rng.sample(LETTERS, k=length)
        down = rng.random() < 0.5
        chosen = sorted(word, reverse=down)
        rejected = chosen[::-1]
        if rng.random() < 0.5:
            at = rng.randrange(length - 1)
            rejected = [*chosen[:at], chosen[at + 1], chosen[at], *chosen[at + 2 :]]
        prompt = f"{'down' if down else 'up'} {''.join(word)}"
        yield {"prompt": prompt, "chosen": "".join(chosen), "rejected": "".join(rejected)}


def answers(seed: int, size: int, length: int = 5) -> Iterator[dict[str, Any]]:
    """Yield one answer of each comparison, good or bad."""
    rng = random.Random(seed)
    for row in pairs(seed, size, length):
        good = rng.random() < 0.5
        yield {"prompt": row["prompt"], "completion": row["chosen" if good else "rejected"], "label": good}
