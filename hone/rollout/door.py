"""A door on the cluster's address to a server's private socket, for a server that runs on another machine.

    adapter (driver's machine) --TCP: requests, each with the run's token--> Door --unix socket--> guard --> server

A door passes bytes on and understands none of them. Who asks for the token is what the socket leads to: every server
of hone has a guard before all of its paths (`guard.py`), which answers 401 to a request that does not show it.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

PIECE_BYTES = 65_536
BACKLOG = 2048


class Door:
    """Listens on one address of this machine, and connects everybody who comes with the socket."""

    def __init__(self, path: Path) -> None:
        """`path`: the socket. It need not be there yet: who comes too early is hung up on."""
        self._path = path
        self._server: asyncio.Server | None = None
        self._visits: set[asyncio.Task[Any]] = set()

    async def open(self, address: str) -> int:
        """Listen on `address`, and on no other; returns the port. Raises OSError if it is not this machine's."""
        self._server = await asyncio.start_server(self._visit, address, 0, backlog=BACKLOG)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        """Listen no longer, and hang up on everybody."""
        if self._server is not None:
            self._server.close()
        visits = list(self._visits)
        for visit in visits:
            visit.cancel()
        await asyncio.gather(*visits, return_exceptions=True)

    async def _visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visit = asyncio.current_task()
        assert visit is not None
        self._visits.add(visit)
        try:
            with suppress(OSError):  # either side hung up
                await self._connect(reader, writer)
        finally:
            writer.close()
            self._visits.discard(visit)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until one of the two sides hangs up; then the other is hung up on."""
        inner_reader, inner_writer = await asyncio.open_unix_connection(self._path)
        ways = [asyncio.create_task(_pass(reader, inner_writer)), asyncio.create_task(_pass(inner_reader, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            inner_writer.close()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(PIECE_BYTES):
        writer.write(piece)
        await writer.drain()


def connector_to(address: str, port: int, **options: Any) -> aiohttp.BaseConnector:
    """For a client session: every name leads to the door."""
    return aiohttp.TCPConnector(resolver=_Sign(address, port), **options)


class _Sign(AbstractResolver):
    """Points to one door, whatever is looked for."""

    def __init__(self, address: str, port: int) -> None:
        self._address = address
        self._port = port

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        kind = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return [ResolveResult(hostname=host, host=self._address, port=self._port, family=kind, proto=0, flags=flags)]

    async def close(self) -> None:
        """Nothing is held."""


__all__ = ["Door", "connector_to"]
