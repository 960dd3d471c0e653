"""A TCP port on the cluster's address in front of a server's private socket, for a server on another machine.

    adapter (driver's machine) --TCP: requests, each with the run's token--> Relay --unix socket--> guard --> server

The relay copies bytes and checks nothing. The guard of every server (`hone/processes/guard.py`) answers 401
to a request without the token.
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


class Relay:
    """Listens on one address of this machine, and connects every client with the socket."""

    def __init__(self, path: Path) -> None:
        """`path`: the socket. Until it exists, clients are disconnected."""
        self._path = path
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[Any]] = set()

    async def open(self, address: str) -> int:
        """Listen on `address` only; returns the port. Raises OSError if it is not an address of this machine."""
        self._server = await asyncio.start_server(self._accept, address, 0, backlog=BACKLOG)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        """Stop listening, and disconnect every client."""
        if self._server is not None:
            self._server.close()
        connections = list(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        self._connections.add(connection)
        try:
            with suppress(OSError):  # either side hung up
                await self._connect(reader, writer)
        finally:
            writer.close()
            self._connections.discard(connection)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copy in both directions until one side disconnects; then disconnect the other."""
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
    """A connector for a client session that resolves every name to the relay."""
    return aiohttp.TCPConnector(resolver=_FixedAddress(address, port), **options)


class _FixedAddress(AbstractResolver):
    """Resolves every name to one address."""

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


__all__ = ["Relay", "connector_to"]
