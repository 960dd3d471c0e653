"""Results that clients ask for: pending, there, or gone."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from hone.service.protocol.refusals import BadRequest, Gone, Refused

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


@dataclass(slots=True)
class _Entry:
    tenant: str
    digest: str  # of the request's content, where its number is no command's
    outcome: Outcome | None = None
    ended: float = 0.0
    done: asyncio.Event = field(default_factory=asyncio.Event)
    announced: bool = False  # its size was told


class Futures:
    """The results of one service, by request id."""

    def __init__(self, kept_s: float) -> None:
        self._kept_s = kept_s
        self._entries: dict[str, _Entry] = {}

    def open(self, request_id: str, tenant: str, anew: bool = False, digest: str = "") -> bool:
        """Begin a result; returns False if there is one of this id. `anew`: one that has ended gives way.

        Raises BadRequest if it is of another content.
        """
        entry = self._entries.get(request_id)
        if entry is not None and entry.digest != digest:
            raise BadRequest(f"{request_id} was used for another request")
        if entry is not None and not (anew and entry.outcome is not None):
            return False
        self._entries[request_id] = _Entry(tenant, digest)
        return True

    def resolve(self, request_id: str, outcome: Outcome) -> None:
        entry = self._entries.get(request_id)
        if entry is not None and entry.outcome is None:
            entry.outcome, entry.ended = outcome, time.monotonic()
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

    def announce(self, request_id: str) -> bool:
        """Return whether the size of a result is still to be told, and note that it is."""
        entry = self._entries[request_id]
        first, entry.announced = not entry.announced, True
        return first

    def forget_old(self) -> list[str]:
        """Drop results that nobody asked for in time; returns their ids."""
        before = time.monotonic() - self._kept_s
        old = [name for name, one in self._entries.items() if one.outcome is not None and one.ended < before]
        for name in old:
            del self._entries[name]
        return old
