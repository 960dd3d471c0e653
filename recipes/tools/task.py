"""Products of four-digit numbers: problems, worked solutions of which some call the tool, and the tool."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from hone.envs.base import ToolResult
from hone.types import Prompt


def rows(seed: int, size: int) -> Iterator[dict[str, Any]]:
    """Yield problems such as "1234*5678", and their answers "=7006652"."""
    rng = random.Random(seed)
    for _ in range(size):
        a, b = rng.randint(1000, 9999), rng.randint(1000, 9999)
        yield {"prompt": f"{a}*{b}", "ground_truth": f"={a * b}", "a": str(a), "b": str(b)}


def worked(seed: int, size: int, tool_rows: int, tool_share: float) -> Iterator[dict[str, Any]]:
    """Yield solved problems as conversations: the first `tool_rows` call the tool, then `tool_share` of them do.

    The others state the product at once, which a small model can only guess.
    """
    rng = random.Random(seed + 1)
    tool = {"type": "function", "function": {"name": "mul"}}
    for number, row in enumerate(rows(seed, size)):
        said = [("user", row["prompt"])]
        if number < tool_rows or rng.random() < tool_share:
            call = f"[mul(a={row['a']},b={row['b']})]"
            said += [("assistant", call), ("tool", row["ground_truth"].removeprefix("="))]
        said.append(("assistant", row["ground_truth"]))
        yield {"messages": [{"role": role, "content": text} for role, text in said], "tools": [tool]}


class Calculator:
    """The tool of one episode. Its first call is a rewarded turn: the share of right digits in its arguments."""

    def __init__(self, prompt: Prompt) -> None:
        self._asked = (str(prompt.row["a"]), str(prompt.row["b"]))
        self._rewarded = False

    def mul(self, a: int, b: int) -> ToolResult:
        """Multiply two numbers."""
        reward = 0.0 if self._rewarded else _share(f"{a}".ljust(4) + f"{b}", self._asked[0] + self._asked[1])
        self._rewarded = True
        return ToolResult(str(a * b), reward=reward)


def _share(found: str, wanted: str) -> float:
    if len(found) > len(wanted):
        return 0.0
    return sum(one == other for one, other in zip(found, wanted, strict=False)) / len(wanted)
