"""Results that clients ask for: pending, there, or gone."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from hone.service.protocol.refusals import BadRequest, Busy, Gone, Refused

JSON, PROTOBUF = "application/json", "application/x-protobuf"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A result: a body, or an error with its category (user, server)."""

    body: bytes = b""
    media: str = JSON
    error: str = ""
    category: str = ""

    @classmethod
    def failed(cls, error: BaseException) -> Outcome:
        if isinstance(error, Refused | ValueError):  # what a request has is wrong
            return cls(error=str(error), category=getattr(error, "category", "user"))
        return cls(error=f"{type(error).__name__}: {error}", category="server")


@dataclass(frozen=True, slots=True)
class Done:
    """The end of a command."""

    outcome: Outcome
    commit: Callable[[], None] = lambda: None  # rows, in the transaction of the result
    after: Callable[[], None] = lambda: None
    replays: bool = False  # whether its content is needed to take the model up again


@dataclass(slots=True)
class _Entry:
    tenant: str
    digest: str  # of the request's content, where its number is no command's
    size: int  # bytes of the request, then of its result
    outcome: Outcome | None = None
    ended: float = 0.0
    done: asyncio.Event = field(default_factory=asyncio.Event)
    announced: bool = False  # its size was told
    fetched: bool = False


class Futures:
    """The results of one service, by request id."""

    def __init__(self, kept_s: float, most_bytes: int) -> None:
        self._kept_s, self._most = kept_s, most_bytes
        self._entries: dict[str, _Entry] = {}
        self._held: Counter[str] = Counter()  # tenant -> bytes of its requests that wait, and of its results

    def make_room(self, tenant: str, size: int) -> list[str]:
        """Drop results that a tenant has fetched, the oldest first, until `size` bytes more fit; returns their ids.

        Raises Busy, and drops nothing, if they do not fit even then.
        """
        chosen, left = [], self._held[tenant] + size - self._most
        for name, one in self._entries.items() if left > 0 else ():
            if left > 0 and one.tenant == tenant and one.fetched:
                chosen.append(name)
                left -= one.size
        if left > 0:
            raise Busy(f"{tenant} has {self._held[tenant]:,} bytes in waiting requests and results: fetch the results")
        for name in chosen:
            self._drop(name)
        return chosen

    def _drop(self, request_id: str) -> None:
        entry = self._entries.pop(request_id)
        self._held[entry.tenant] -= entry.size

    def open(self, request_id: str, tenant: str, anew: bool = False, digest: str = "", size: int = 0) -> bool:
        """Begin a result; returns False if there is one of this id. `anew`: one that has ended gives way.

        Raises BadRequest if it is of another content.
        """
        entry = self._entries.get(request_id)
        if entry is not None and entry.digest != digest:
            raise BadRequest(f"{request_id} was used for another request")
        if entry is not None and not (anew and entry.outcome is not None):
            return False
        if entry is not None:
            self._drop(request_id)
        self._entries[request_id] = _Entry(tenant, digest, size)
        self._held[tenant] += size
        return True

    def resolve(self, request_id: str, outcome: Outcome) -> None:
        entry = self._entries.get(request_id)
        if entry is not None and entry.outcome is None:
            entry.outcome, entry.ended = outcome, time.monotonic()
            self._held[entry.tenant] += len(outcome.body) - entry.size
            entry.size = len(outcome.body)
            entry.done.set()

    async def wait(self, request_id: str, tenant: str, timeout_s: float) -> Outcome | None:
        """The result; None: it is not there yet. Raises Gone for an id that is unknown or of another tenant."""
        entry = self._entries.get(request_id)
        if entry is None or entry.tenant != tenant:
            raise Gone(f"there is no request {request_id!r:.200}, or its result is kept no more")
        if entry.outcome is None:
            try:
                async with asyncio.timeout(timeout_s):
                    await entry.done.wait()
            except TimeoutError:
                return None
        return entry.outcome

    def note_fetched(self, request_id: str) -> None:
        """Note that a client has a result, which may have been dropped since somebody else fetched it."""
        if (entry := self._entries.get(request_id)) is not None:
            entry.fetched = True

    def announce(self, request_id: str) -> bool:
        """Return whether the size of a result is to be told before it is sent, which is once."""
        entry = self._entries.get(request_id)
        if entry is None or entry.announced:
            return False
        entry.announced = True
        return True

    def forget_old(self) -> list[str]:
        """Drop results that nobody asked for in time; returns their ids."""
        before = time.monotonic() - self._kept_s
        old = [name for name, one in self._entries.items() if one.outcome is not None and one.ended < before]
        for name in old:
            self._drop(name)
        return old
