"""One-line Python functions over a list of numbers, described in three words and checked by assertions.

`total square divided3` asks for the sum of the squares of the numbers that three divides:
`f=lambda v:sum(x*x for x in v if x%3==0)`. The words are not the code, so a policy has to learn what each one means.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

Number = Callable[[int, int], int]  # of an element and the digit in the word
FOLDS: list[tuple[str, str, Callable[[list[int]], Any]]] = [
    ("total", "sum", sum),
    ("largest", "max", max),
    ("smallest", "min", min),
    ("ordered", "sorted", sorted),
]
MAPS: list[tuple[str, str, Number]] = [
    ("each", "x", lambda x, k: x),
    ("square", "x*x", lambda x, k: x * x),
    ("minus", "-x", lambda x, k: -x),
    ("plus#", "x+#", lambda x, k: x + k),
    ("times#", "x*#", lambda x, k: x * k),
]
FILTERS: list[tuple[str, str, Number]] = [
    ("all", "", lambda x, n: True),
    ("odd", " if x%2", lambda x, n: x % 2),
    ("above#", " if x>#", lambda x, n: x > n),
    ("below#", " if x<#", lambda x, n: x < n),
    ("divided#", " if x%#==0", lambda x, n: x % n == 0),
]
DIGITS = range(2, 8)
HELD_OUT_SHARE = 8  # one task in eight


@dataclass(frozen=True)
class Task:
    """Words, the program that they describe, and what it computes."""

    words: str
    program: str
    compute: Callable[[list[int]], Any]  # None for an empty selection, which has no largest number


def rows(seed: int, size: int, split: Literal["train", "held_out"], tests: int = 4) -> Iterator[dict[str, Any]]:
    """Yield tasks of one split with their tests and a solution; a task is always in the same split."""
    rng = random.Random(seed)
    held_out = [task for task in all_tasks() if zlib.crc32(task.words.encode()) % HELD_OUT_SHARE == 0]
    known = held_out if split == "held_out" else [task for task in all_tasks() if task not in held_out]
    for number in range(size):
        if number % len(known) == 0:
            rng.shuffle(known)
        task = known[number % len(known)]
        yield {"prompt": task.words, "solution": task.program, "ground_truth": list(_assertions(task, rng, tests))}


def all_tasks() -> list[Task]:
    """Every combination of a fold, a map and a filter, each with every digit if it has one."""
    return [
        Task(f"{fold} {one} {two}", f"f=lambda v:{call}({term} for x in v{condition})", _computed(total, value, keeps))
        for fold, call, total in FOLDS
        for (one, term, value), (two, condition, keeps) in itertools.product(_filled(MAPS), _filled(FILTERS))
    ]


def _filled(table: list[tuple[str, str, Number]]) -> Iterator[tuple[str, str, Callable[[int], int]]]:
    for word, text, function in table:
        for digit in DIGITS if "#" in word else [0]:
            yield word.replace("#", str(digit)), text.replace("#", str(digit)), lambda x, f=function, d=digit: f(x, d)


def _computed(
    total: Callable[[list[int]], Any], value: Callable[[int], int], keeps: Callable[[int], int]
) -> Callable[[list[int]], Any]:
    def compute(numbers: list[int]) -> Any:
        chosen = [value(x) for x in numbers if keeps(x)]
        return total(chosen) if chosen else None

    return compute


def _assertions(task: Task, rng: random.Random, tests: int) -> Iterator[str]:
    made = 0
    while made < tests:
        numbers = [rng.randint(-9, 30) for _ in range(rng.randint(4, 8))]
        expected = task.compute(numbers)
        if expected is not None:
            made += 1
            yield f"assert f({numbers}) == {expected}"
