"""The address of a rollout server that runs elsewhere: one run at a time attaches to it, then sends it requests.

    run --"attach TOKEN"--> Front    answers with what the server serves; while this connection is open, the server
                                     belongs to the run
        --HTTP------------> Front ==> the server's private socket; only while a run is attached

Without the token nothing is answered, and a connection that does not say within `FIRST_S` what it wants is closed. When
the run detaches, or dies, its requests end, and the next run can attach. The other side is `attached`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hone.processes.guard import same_token
from hone.rollout.servers.relay import Relay, connect_streams

LOG = logging.getLogger(__name__)

ATTACH = "attach"  # first word of the line that attaches; an HTTP request begins otherwise
FIRST_S = 10.0  # deadline of the first line
IDLE_S, PROBES_S, PROBES = 30, 10, 3  # TCP keep-alive: a run whose machine is gone is detached after a minute


class Front(Relay):
    """Listens on one address for the run that uses the server."""

    def __init__(self, path: Path, token: str, serves: Mapping[str, Any], clean: Callable[[], Awaitable[None]]) -> None:
        """`path`: the server's socket; `serves`: what a run compares with its own settings; `clean` undoes
        what an earlier run may have left, such as a pause; its requests ended with it."""
        super().__init__(path)
        self._token = token
        self._serves = serves
        self._clean = clean
        self._run: asyncio.StreamWriter | None = None  # the run that is attached

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(FIRST_S):
                line = await reader.readuntil(b"\n")
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return
        word, _, given = line.decode("latin-1").strip().partition(" ")
        if word == ATTACH:
            await self._attach(given, reader, writer)
        elif self._run is not None:
            await connect_streams(self._path, reader, writer, line)

    async def _attach(self, given: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not same_token(given, self._token):
            await _say(writer, {"error": "the token is not this server's"})
        elif self._run is not None:
            await _say(writer, {"error": "another run uses it"})
        else:
            self._run = writer
            keep_alive(writer.get_extra_info("socket"))
            try:
                await self._clean()
                await _say(writer, {"serves": dict(self._serves)})
                LOG.warning("a run has attached from %s", writer.get_extra_info("peername")[0])
                await reader.read(1)  # the run sends nothing more: this is its end
            finally:
                self.disconnect(but=asyncio.current_task())
                self._run = None
                LOG.warning("the run has detached")


async def _say(writer: asyncio.StreamWriter, answer: Mapping[str, Any]) -> None:
    writer.write(json.dumps(answer).encode() + b"\n")
    with suppress(ConnectionError):
        await writer.drain()


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel notice that the other machine is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", IDLE_S), ("TCP_KEEPINTVL", PROBES_S), ("TCP_KEEPCNT", PROBES)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


__all__ = ["ATTACH", "Front", "keep_alive"]
