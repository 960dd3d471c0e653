"""One asyncio event loop for a whole run, entered by a synchronous trainer for one coroutine at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

R = TypeVar("R")


class EventLoop:
    """Where rollout engine, environments and reward workers meet.

    Nothing runs on it between two calls of `run`, so the trainer's own code and the loop never race.
    """

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Run one coroutine to its end on the loop."""
        return self._runner.run(coroutine)

    def close(self) -> None:
        self._runner.close()
