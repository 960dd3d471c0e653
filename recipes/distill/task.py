"""Two small tasks on six letters, reversing and sorting. The column `task` of a row names its task."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from typing import Any, Literal

LETTERS = "abcdef"
HELD_OUT_SHARE = 8  # one string in eight


def rows(
    seed: int, size: int, split: Literal["train", "held_out"], tasks: tuple[str, ...] = ("reverse",), length: int = 5
) -> Iterator[dict[str, Any]]:
    """Yield `size` rows. A string is always in the same split, so held-out strings are never trained on."""
    rng = random.Random(f"{seed}/{split}")
    made = 0
    while made < size:
        text = "".join(rng.choices(LETTERS, k=length))
        if (zlib.crc32(text.encode()) % HELD_OUT_SHARE == 0) != (split == "held_out"):
            continue
        task = rng.choice(tasks)
        answer = text[::-1] if task == "reverse" else "".join(sorted(text))
        made += 1
        yield {"prompt": ("<" if task == "reverse" else "=") + text, "ground_truth": answer, "task": task}
