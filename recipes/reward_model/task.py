"""Answers to score: words sorted more or less well, and words sorted step by step, each step right or wrong."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

LETTERS = "abcdefghij"


def comparisons(seed: int, size: int, length: int = 5) -> Iterator[dict[str, Any]]:
    """`size` rows such as "sort decab": of two orders of the letters the one with fewer inversions was chosen.

    `margin` grows with the difference.
    """
    rng = random.Random(seed)
    for _ in range(size):
        word = rng.sample(LETTERS, k=length)
        first, second = list(word), list(word)
        while inversions(first) == inversions(second):
            rng.shuffle(first)
            rng.shuffle(second)
        better, worse = sorted((first, second), key=inversions)
        margin = 0.1 * (inversions(worse) - inversions(better))
        yield {
            "prompt": "sort " + "".join(word), "chosen": "".join(better), "rejected": "".join(worse), "margin": margin
        }  # fmt: skip


def words(seed: int, size: int, length: int = 5) -> Iterator[dict[str, str]]:
    """`size` prompts such as "sort decab", with the sorted letters."""
    rng = random.Random(seed)
    for _ in range(size):
        word = rng.sample(LETTERS, k=length)
        yield {"prompt": "sort " + "".join(word), "ground_truth": "".join(sorted(word))}


def letters(response: str, ground_truth: str, row: dict[str, Any]) -> float:
    """1.0 for an answer of just the letters of the word, in any order; each one missing or too many costs a share."""
    found, wanted = Counter(response), Counter(ground_truth)
    wrong = (found - wanted).total() + (wanted - found).total()
    return max(0.0, 1.0 - wrong / len(ground_truth))


def inversions(letters: list[str]) -> int:
    """How many pairs of letters are the wrong way round."""
    return sum(a > b for i, a in enumerate(letters) for b in letters[i + 1 :])


def selections(seed: int, size: int, length: int = 5) -> Iterator[dict[str, Any]]:
    """`size` rows such as "sort decab": letter after letter is taken out of the word, which is to be the smallest left.

    Each step is right or wrong by itself: after a wrong one, the next is judged by the letters that remain.
    """
    rng = random.Random(seed)
    for _ in range(size):
        word = rng.sample(LETTERS, k=length)
        left, steps, labels = sorted(word), [], []
        while len(left) > 1:
            right = rng.random() < 0.5
            steps.append(left.pop(0 if right else rng.randrange(1, len(left))))
            labels.append(right)
        yield {"prompt": "sort " + "".join(word), "completions": [f"take {step}" for step in steps], "labels": labels}
