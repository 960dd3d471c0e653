"""Limits of an HTTP listener in hone's own process, for clients that never finish what they begin.

    connection --> bounded(): few of them, and a deadline for the head of each request --> application
    body       --> read_body(): so many bytes, within so many seconds

Whoever exceeds a limit is disconnected; the log has one line a minute about all of them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import uvicorn
from fastapi import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from hone.processes.guard import Receive

LOG = logging.getLogger("hone.processes")
HEAD_S, BODY_S = 10.0, 60.0  # deadlines for the head and for the body of one request
LOG_EVERY_S = 60.0


class BodyRefused(ValueError):
    """A body that is too long, too slow, or in a form that is not taken."""

    def __init__(self, message: str, status: int = 413) -> None:
        super().__init__(message)
        self.status = status


class Refusals:
    """Counts the connections that a listener ended, and logs them now and then."""

    def __init__(self, listener: str) -> None:
        self.counts: dict[str, int] = {}
        self._listener = listener
        self._logged_at = -math.inf

    def note(self, why: str) -> None:
        self.counts[why] = self.counts.get(why, 0) + 1
        if time.monotonic() >= self._logged_at + LOG_EVERY_S:
            self._logged_at = time.monotonic()
            found = ", ".join(f"{count} because {reason}" for reason, count in self.counts.items())
            LOG.warning("%s: connections ended since the start: %s", self._listener, found)


def bounded(refusals: Refusals, most: Callable[[], int], head_s: float = HEAD_S) -> type[H11Protocol]:
    """uvicorn's protocol (`http` of its Config) with at most `most()` connections and a deadline for each head."""

    class Bounded(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > (limit := most()):
                self._end(f"there were {limit} already")
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._stop()

        def _watch(self) -> None:
            """Start the deadline while a head is due, and end it when the head is there."""
            is_due = self.cycle is None or self.cycle.response_complete
            if not is_due:
                self._stop()
            elif self._deadline is None:
                self._deadline = self.loop.call_later(head_s, self._end, f"no request came within {head_s:g} s")

        def _stop(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
            self._deadline = None

        def _end(self, why: str) -> None:
            if not self.transport.is_closing():
                refusals.note(why)
                self.transport.abort()

    return Bounded


class LoopServer(uvicorn.Server):
    """uvicorn's server on an event loop that is not its own; it leaves signals to its caller."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def end(self) -> None:
        self.should_exit = True


async def read_body(request: Request, most: int, timeout_s: float = BODY_S) -> bytes:
    """The body of a request. Raises BodyRefused before more than `most` bytes are held, or after the deadline."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > most:
        raise BodyRefused(f"the request has {int(announced):,} bytes; at most {most:,} are taken")
    found = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for piece in request.stream():
                found += piece
                if len(found) > most:
                    raise BodyRefused(f"the request has more than {most:,} bytes")
    except TimeoutError as error:
        raise BodyRefused(f"the request's body did not come within {timeout_s:g} s") from error
    return bytes(found)


def decompressed(body: bytes, encoding: str, most: int) -> bytes:
    """Undo `Content-Encoding`. Raises BodyRefused for one that is unknown, damaged data, or more than `most` bytes."""
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise BodyRefused(f"Content-Encoding: {encoding} is not supported; send zstd or none", 415)
    try:
        with pa.CompressedInputStream(pa.BufferReader(body), "zstd") as stream:
            found = bytearray()
            while len(found) <= most and (piece := stream.read(min(most + 1 - len(found), 1 << 20))):
                found += piece
    except OSError as error:
        raise BodyRefused(f"the body is not valid zstd: {error}", 400) from error
    if len(found) > most:
        raise BodyRefused(f"the body has more than {most:,} bytes after decompression")
    return bytes(found)


def replayed(body: bytes, receive: Receive) -> Receive:
    """The messages of a request whose body was read: the body again, then what comes after it."""
    sent = False

    async def again() -> Any:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


__all__ = ["BodyRefused", "LoopServer", "Refusals", "bounded", "decompressed", "read_body", "replayed"]
