"""Tools as a user writes them."""

import asyncio
import time
from typing import Literal

from hone.envs.base import ToolLost, ToolResult
from hone.envs.functions import tool


class Calculator:
    """Keeps the number of its calls."""

    def __init__(self, prompt=None, start: int = 0):
        self.calls = start

    def add(self, a: float, b: float = 1.0) -> float:
        """Add two numbers.

        Args:
            a: the first
            b (float): the second
        """
        self.calls += 1
        return a + b

    def count(self) -> int:
        """Say how often `add` was called."""
        return self.calls

    def _hidden(self):
        raise AssertionError


@tool
def shout(words: list[str], ending: Literal["!", "?"] = "!") -> str:
    return " ".join(words).upper() + ending


@tool
async def wait(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"


@tool
def block(seconds: float) -> str:
    time.sleep(seconds)
    return "done"


@tool
def fail() -> str:
    raise ZeroDivisionError("by zero")


@tool
def lose() -> str:
    raise ToolLost("the server is gone")


@tool
def finish(score: float) -> ToolResult:
    return ToolResult("bye", done=True, reward=score, anchor="the end")


def bare(a, b: int):
    return a


def many(*values: int):
    return values


def odd(a: "Nothing"):  # noqa: F821
    return a


class Empty:
    def _hidden(self): ...


class Both:
    def add(self, a: int) -> int:
        return a
