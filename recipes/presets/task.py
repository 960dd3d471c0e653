"""Reverse four letters, then the end token. Answers vary in length, and held-out strings are never trained on."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

ALPHABET = "abcdefgh"
LENGTH = 4
HELD_OUT_SHARE = 16  # one string in sixteen is never trained on


def rows(seed: int, size: int, split: Literal["train", "held_out"]) -> Iterator[dict[str, str]]:
    """Yield `size` random strings of one split, with their reverse as ground truth."""
    rng = random.Random(seed)
    made = 0
    while made < size:
        text = "".join(rng.choices(ALPHABET, k=LENGTH))
        if (zlib.crc32(text.encode()) % HELD_OUT_SHARE == 0) == (split == "held_out"):
            made += 1
            yield {"prompt": text, "ground_truth": text[::-1]}


def right_letters(response: str, ground_truth: Any, row: Mapping[str, Any]) -> float:
    """Return the share of letters at the right position; an answer of another length gets 0."""
    if len(response) != len(ground_truth):
        return 0.0
    return sum(a == b for a, b in zip(response, ground_truth, strict=True)) / len(ground_truth)
