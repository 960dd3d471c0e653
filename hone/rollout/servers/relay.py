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

    async def open(self, address: str, port: int = 0) -> int:
        """Listen on `address` only; returns the port, 0 takes a free one. Raises OSError for another machine's."""
        self._server = await asyncio.start_server(self._accept, address, port, backlog=BACKLOG)
        taken: int = self._server.sockets[0].getsockname()[1]
        return taken

    async def close(self) -> None:
        """Stop listening, and disconnect every client."""
        if self._server is not None:
            self._server.close()
        await asyncio.gather(*self.disconnect(), return_exceptions=True)

    def disconnect(self, but: asyncio.Task[Any] | None = None) -> list[asyncio.Task[Any]]:
        """Begin to end every connection but one."""
        ending = [one for one in self._connections if one is not but]
        for connection in ending:
            connection.cancel()
        return ending

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        self._connections.add(connection)
        try:
            with suppress(OSError):  # either side hung up
                await self._handle(reader, writer)
        finally:
            writer.close()
            self._connections.discard(connection)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await connect_streams(self._path, reader, writer)


async def connect_streams(
    path: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first: bytes = b""
) -> None:
    """Copy to and from a socket until one side disconnects; then disconnect the other. `first` was read already."""
    inner_reader, inner_writer = await asyncio.open_unix_connection(path)
    inner_writer.write(first)
    ways = [asyncio.create_task(_pass(reader, inner_writer)), asyncio.create_task(_pass(inner_reader, writer))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        inner_writer.close()  # before the wait: another cancellation may end it
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


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


__all__ = ["Relay", "connect_streams", "connector_to"]
