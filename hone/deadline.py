"""The deadline of an episode: its clock stands still while a request of the episode waits for a seat at the rollout.

    envs       async with Deadline(timeout_s) as deadline: ... generate(...) ...
    rollout    with SeatWait(): ...                     the wait of one request, in the task that called `generate`
               wait = SeatWait(); wait.begin(); wait.end()     the same where another task hands out the seats

A deadline that counted the wait would end the longest answers of a step first: they begin last to end. `SeatWait` finds
the deadline in a context variable, so neither side knows the other; without a deadline it does nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Stalled(RuntimeError):
    """The run made no progress for `runtime.stall_timeout_s`; the stacks of all threads have been printed.

    The watchdog raises it wherever the main thread is, so whoever catches everything lets it through.
    """


_CURRENT: ContextVar[Deadline] = ContextVar("deadline")


class Deadline:
    """A time limit like `asyncio.timeout`, without the time in which a request waits for a seat. Used once."""

    def __init__(self, seconds: float) -> None:
        self.unfinished_tokens = 0  # sampled by requests that were cancelled, as far as their engine knows
        self._left_s = seconds
        self._timeout = asyncio.timeout(seconds)
        self._waits = 0
        self._open = False

    async def __aenter__(self) -> Deadline:
        await self._timeout.__aenter__()
        self._open = True
        self._token = _CURRENT.set(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        _CURRENT.reset(self._token)
        await self._timeout.__aexit__(kind, error, trace)

    @property
    def stands_still(self) -> bool:
        """Return whether a request waits for a seat."""
        return self._waits > 0

    def expired(self) -> bool:
        return self._timeout.expired()

    def when(self) -> float | None:
        """The end by the event loop's clock; None while the clock stands still."""
        return self._timeout.when()

    def over(self, generate: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R]]:
        """`generate` for tasks that the episode did not start, such as the handlers of an HTTP server."""

        async def call(*args: P.args, **kwargs: P.kwargs) -> R:
            token = _CURRENT.set(self)
            try:
                return await generate(*args, **kwargs)
            finally:
                _CURRENT.reset(token)

        return call

    def _count(self, change: int) -> None:
        before, self._waits = self._waits, self._waits + change
        end = self._timeout.when()
        if not self._open or self._timeout.expired():
            return
        now = asyncio.get_running_loop().time()
        if before == 0 and end is not None:
            self._left_s = end - now
            self._timeout.reschedule(None)
        elif self._waits == 0:
            self._timeout.reschedule(now + self._left_s)


class SeatWait:
    """The wait of one request for a seat. `begin` and `end` may be called again, in any order."""

    def __init__(self) -> None:
        self._deadline = _CURRENT.get(None)
        self._waits = False

    def begin(self) -> None:
        if self._deadline is not None and not self._waits:
            self._waits = True
            self._deadline._count(+1)

    def end(self) -> None:
        if self._deadline is not None and self._waits:
            self._waits = False
            self._deadline._count(-1)

    def lost(self, tokens: int) -> None:
        """The request was cancelled after it had sampled so many tokens."""
        if self._deadline is not None:
            self._deadline.unfinished_tokens += tokens

    def __enter__(self) -> SeatWait:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


__all__ = ["Deadline", "SeatWait", "Stalled"]
