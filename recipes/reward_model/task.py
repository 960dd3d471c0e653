"""Answers to score: sorted words with some errors, and words sorted step by step, each step right or wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

LETTERS = "abcdefghij"


def comparisons(seed: int, size: int, length: int = 5) -> Iterator[dict[str, Any]]:
    """Yield `size` rows such as "sort decab"; of two attempts, the one closer to the sorted word is chosen.

    Attempts have the errors of a policy: letters in the wrong order, wrong letters, too many or too few. `margin` grows
    with the difference.
    """
    rng = random.Random(seed)
    for _ in range(size):
        word = rng.sample(LETTERS, k=length)
        target = sorted(word)
        better, worse = target, target
        while faults(better, target) == faults(worse, target):
            better, worse = attempt(rng, target), attempt(rng, target)
        better, worse = sorted((better, worse), key=lambda one: faults(one, target))
        margin = 0.2 * (faults(worse, target) - faults(better, target))
        yield {
            "prompt": "sort " + "".join(word), "chosen": "".join(better), "rejected": "".join(worse), "margin": margin
        }  # fmt: skip


def attempt(rng: random.Random, target: list[str]) -> list[str]:
    """Return the word with some errors: none in one attempt of three, otherwise up to three."""
    found = list(target)
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
        at = rng.randrange(len(found))
        match rng.randrange(5):
            case 0 if len(found) > 1:
                del found[at]
            case 1:
                found.insert(at, rng.choice(LETTERS))
            case 2 | 3:
                found[at] = rng.choice(LETTERS)
            case _:
                other = rng.randrange(len(found))
                found[at], found[other] = found[other], found[at]
    return found


def faults(answer: list[str], target: list[str]) -> int:
    """Count the wrong positions, including missing and extra letters."""
    right = sum(a == b for a, b in zip(answer, target, strict=False))
    return max(len(answer), len(target)) - right


def words(seed: int, size: int, length: int = 5) -> Iterator[dict[str, str]]:
    """Yield `size` prompts such as "sort decab", with the sorted letters."""
    rng = random.Random(seed)
    for _ in range(size):
        word = rng.sample(LETTERS, k=length)
        yield {"prompt": "sort " + "".join(word), "ground_truth": "".join(sorted(word))}


def selections(seed: int, size: int, length: int = 5) -> Iterator[dict[str, Any]]:
    """Yield `size` rows such as "sort decab"; each step takes a letter out of the word, right if it is the smallest.

    After a wrong step, the next one is compared with the letters that remain.
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
