"""Products of two numbers, worked solutions that call a tool, and the tool that computes them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Literal


def rows(seed: int, size: int, split: Literal["train", "held_out"] = "train") -> Iterator[dict[str, Any]]:
    """Yield problems such as "What is 347 times 86?"; a pair of numbers is in one split only."""
    chance = random.Random(f"{seed}-{split}")
    while size:
        a, b = chance.randint(100, 999), chance.randint(11, 99)
        if ((a + b) % 4 == 0) == (split == "held_out"):
            yield {"prompt": f"What is {a} times {b}?", "ground_truth": str(a * b), "a": str(a), "b": str(b)}
            size -= 1


def worked(seed: int, size: int) -> Iterator[dict[str, Any]]:
    """Yield solved problems as conversations: a call, the tool's result, and the answer."""
    for row in rows(seed, size):
        call = f"[multiply(a={row['a']}, b={row['b']})]"
        said = [("user", row["prompt"]), ("assistant", call), ("tool", row["ground_truth"])]
        said.append(("assistant", row["ground_truth"]))
        yield {
            "messages": [{"role": role, "content": text} for role, text in said],
            "tools": [{"type": "function", "function": {"name": "multiply"}}],
        }


def multiply(a: int, b: int) -> str:
    """Multiply two numbers."""
    return str(a * b)
