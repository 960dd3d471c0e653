"""Conversations of two turns about sums: the second question goes on with the first answer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any


def rows(seed: int, size: int, largest: int = 99) -> Iterator[dict[str, Any]]:
    """`size` conversations such as 23+45 -> 68, then -7 -> 61."""
    rng = random.Random(seed)
    for _ in range(size):
        first, second, third = (rng.randint(0, largest) for _ in range(3))
        total = first + second
        operator, result = rng.choice([("+", total + third), ("-", total - third)])
        yield {
            "messages": [
                {"role": "user", "content": f"{first}+{second}"},
                {"role": "assistant", "content": str(total)},
                {"role": "user", "content": f"{operator}{third}"},
                {"role": "assistant", "content": str(result)},
            ]
        }
