"""Notice a server that hangs: stopped, deadlocked, or with an engine that computes nothing while its HTTP part answers.

    watch of the router --listen, every WATCH_S--> Heartbeat --beat--> server: health route, tokens computed so far
                        <--why it hangs-----------

Time counts only while the router's event loop runs, so a trainer that blocks its own loop is no silent server.
"""

from __future__ import annotations

import asyncio
from typing import Any

from hone.processes.descriptors import OutOfDescriptors

BEATS = 10  # questions within the time after which a server counts as hung


class Heartbeat:
    """The signs of life of one server."""

    def __init__(self, server: Any, patience_s: float) -> None:
        """`server.beat()` returns the tokens that it has computed so far; None: unknown, or it may not compute now."""
        self._server = server
        self._patience_s = patience_s
        self._question: asyncio.Task[None] | None = None
        self._tokens: int | None = None
        self._silent_s = self._stuck_s = self._rest_s = 0.0

    def listen(self, seconds: float, is_busy: bool) -> str:
        """Ask again if it is time to; returns why it counts as hung, or an empty string.

        `seconds`: since the last call. `is_busy`: it has requests, so its tokens should grow.
        """
        self._silent_s += seconds
        self._stuck_s += seconds
        self._rest_s -= seconds
        if not is_busy:
            self._stuck_s = 0.0
        if self._rest_s <= 0 and (self._question is None or self._question.done()):
            self._rest_s = self._patience_s / BEATS
            self._question = asyncio.get_running_loop().create_task(self._ask(), name="heartbeat")
        if self._silent_s > self._patience_s:
            return f"it gave no sign of life for {self._patience_s:g} s"
        if self._stuck_s > self._patience_s:
            return f"it has requests, and computed no token for {self._patience_s:g} s"
        return ""

    async def _ask(self) -> None:
        try:
            tokens = await self._server.beat()
        except OutOfDescriptors:  # this process cannot ask
            self._silent_s = self._stuck_s = 0.0
        except (RuntimeError, ValueError, OSError):  # no answer, or none that a server in order gives
            return
        else:
            self._silent_s = 0.0
            if tokens is None or tokens != self._tokens:
                self._stuck_s = 0.0
            self._tokens = tokens

    def end(self) -> None:
        """Forget what was heard, for a pause or another process."""
        if self._question is not None:
            self._question.cancel()
        self._question, self._tokens = None, None
        self._silent_s = self._stuck_s = self._rest_s = 0.0


__all__ = ["Heartbeat"]
