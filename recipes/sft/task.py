"""Conversations of two turns: reverse or sort a word, then the answer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

LETTERS = "abcdefghij"


def rows(seed: int, size: int) -> Iterator[dict[str, Any]]:
    """Yield `size` conversations such as "reverse fade" -> "edaf", then "sort it" -> "adef"."""
    rng = random.Random(seed)
    for _ in range(size):
        word = "".join(rng.choices(LETTERS, k=rng.randint(3, 6)))
        messages = []
        for turn in range(2):
            verb = rng.choice(["reverse", "sort"])
            answer = word[::-1] if verb == "reverse" else "".join(sorted(word))
            messages += [
                {"role": "user", "content": f"{verb} {'it' if turn else word}"},
                {"role": "assistant", "content": answer},
            ]
            word = answer
        yield {"messages": messages}
