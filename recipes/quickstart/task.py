"""Spell words backward: reasoning-gym's `spell_backward`, with separate words for training and evaluation.

The package draws words with replacement, so two seeds share words. Here each word is always in the same split, so
held-out words are never trained on, neither in the warm start nor in RL.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, Literal

from hone.data.sources.reasoning_gym_patches import load_package

TASK = "spell_backward"
HELD_OUT_SHARE = 16  # one word in sixteen


def rows(
    seed: int, size: int, split: Literal["train", "held_out"], min_length: int, max_length: int
) -> Iterator[dict[str, Any]]:
    """Yield problems of one split, each word once. The package's verifier needs the columns `task` and `entry`."""
    words = {"min_word_len": min_length, "max_word_len": max_length}
    problems = load_package().create_dataset(TASK, seed=seed, size=20 * size, **words)
    seen: set[str] = set()
    for entry in problems:
        word = entry["metadata"]["word"].lower()
        held_out = zlib.crc32(word.encode()) % HELD_OUT_SHARE == 0
        if word not in seen and held_out == (split == "held_out"):
            seen.add(word)
            yield {"prompt": word, "ground_truth": word[::-1], "task": TASK, "entry": entry}
