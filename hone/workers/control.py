"""Requests to a running run, as files in `<run>/control`: a server joins, or a server leaves.

    hone rollout join RUN    --> <id>.request  {"verb": "join"}                --> the run's event loop, one at a time
    (`request`)              <-- <id>.answer   {"text": ...} or {"error": ...} <-- (`serve_control`)

Who can write into the run folder may ask; nothing listens on a network. Files appear whole, because they are renamed.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hone.rollout.base import ServerAdapter
from hone.rollout.router import Router

CONTROL = "control"
REQUEST, ANSWER = ".request", ".answer"
LOOK_S = 0.5  # between two looks into the folder
VERBS = ("join", "leave")


class Membership:
    """Servers that join and leave the rollout of a run."""

    def __init__(self, router: Router, another: Callable[[], ServerAdapter], timeout_s: float) -> None:
        """`another` makes one more server; `timeout_s`: longest wait for a sync that a leaving server is part of."""
        self._router = router
        self._another = another
        self._timeout_s = timeout_s

    async def add(self) -> str:
        """Start one more server; it serves once it has proven weights. Returns its name."""
        server = await asyncio.to_thread(self._another)
        await server.start()
        self._router.pool.add(server)
        return server.name

    async def remove(self, name: str) -> None:
        """Take a server away; its answers go on at others. Raises ValueError if it cannot go."""
        await self._router.pool.retire(name, self._timeout_s)


def request(folder: Path, verb: str, replica: str, timeout_s: float) -> str:
    """Ask a run and wait for its answer. Raises ValueError with the run's error, TimeoutError without an answer."""
    folder.mkdir(exist_ok=True)
    asked = folder / f"{secrets.token_hex(8)}{REQUEST}"
    answer = asked.with_suffix(ANSWER)
    _write(asked, {"verb": verb, "replica": replica})
    deadline = time.monotonic() + timeout_s
    try:
        while not answer.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the run did not answer within {timeout_s:g} s")
            time.sleep(LOOK_S)
        found = json.loads(answer.read_text(encoding="utf-8"))
    finally:
        asked.unlink(missing_ok=True)
        answer.unlink(missing_ok=True)
    if "error" in found:
        raise ValueError(found["error"])
    return str(found["text"])


async def serve_control(folder: Path, members: Membership) -> None:
    """Answer requests until it is cancelled; each verb has deadlines of its own."""
    for old in folder.glob(f"*{ANSWER}"):
        old.unlink(missing_ok=True)
    for old in folder.glob(f"*{REQUEST}"):  # perhaps of an earlier launch
        _write(old.with_suffix(ANSWER), {"error": "the run was only starting; ask again"})
        old.unlink(missing_ok=True)
    while True:
        for asked in sorted(folder.glob(f"*{REQUEST}")):
            found = await _answer(asked, members)
            if asked.exists():  # else nobody waits any more
                _write(asked.with_suffix(ANSWER), found)
                asked.unlink(missing_ok=True)
        await asyncio.sleep(LOOK_S)


async def _answer(asked: Path, members: Membership) -> Mapping[str, Any]:
    try:
        wanted = json.loads(asked.read_text(encoding="utf-8"))
        verb, replica = wanted["verb"], str(wanted.get("replica", ""))
        if verb == "join":
            return {"text": f"{await members.add()} has joined and receives weights"}
        if verb == "leave":
            await members.remove(replica)
            return {"text": f"{replica} has left; its answers go on at the other servers"}
        return {"error": f"a run knows the verbs {', '.join(VERBS)}; found {verb!r}"}
    except Exception as error:  # noqa: BLE001  the one who asked gets it, and the run goes on
        return {"error": f"{type(error).__name__}: {error}"}


def _write(path: Path, content: Mapping[str, Any]) -> None:
    new = path.with_suffix(f"{path.suffix}.new")
    new.write_text(json.dumps(dict(content)), encoding="utf-8")
    new.replace(path)
