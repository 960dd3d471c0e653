"""JSON-RPC messages to an MCP server: over the pipes of a child process, or by streamable HTTP.

    PipeTransport   one JSON object in a line, each way; a task reads the server's lines and settles the requests
    HttpTransport   one POST for each message; the reply is JSON, or an event stream that contains it

The server is foreign code: its messages are limited in size and depth, and a connection that breaks is `ToolLost`.
Deadlines are the caller's: cancelling a request forgets it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from hone.envs.base import ToolLost
from hone.processes.child import ServerFailed
from hone.processes.http_client import http_session, proxy_of
from hone.processes.leftovers import remove_folder
from hone.processes.piped import PipedProcess
from hone.processes.supervisor import FOLDER
from hone.processes.untrusted_json import parse_json_apart

LOG = logging.getLogger("hone.envs")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LARGEST_MESSAGE = 64 << 20  # bytes
STOP_S = 2.0  # how long a server may take to end after SIGTERM
LINES_IN_TURN = 64  # of one server, before others are served
MOST_WARNINGS = 10  # about lines that are no messages
MOST_LOG = 64 << 20  # bytes that a server may write to its log before hone empties it
MOST_UNREAD = 8 << 20  # bytes of answers that a server has not read
NO_METHOD = -32601
Rpc = dict[str, Any]


class Transport(Protocol):
    """A connection to one server."""

    async def open(self) -> None:
        """Connect. Raises ToolLost."""

    async def request(self, message: Rpc) -> Rpc:
        """Send a request and return the response with its id. Raises ToolLost."""

    async def notify(self, message: Rpc) -> None:
        """Send a message that has no response. Raises ToolLost."""

    async def close(self) -> None:
        """Disconnect, and end the server if it was started here."""

    @property
    def lost(self) -> bool:
        """Return whether the connection is known to be broken."""

    @property
    def broken(self) -> str:
        """The last line that begins like a message and is none, "" without one."""

    def log(self) -> str:
        """The last lines that the server wrote to its log, for an error."""


class PipeTransport:
    """A server in a process of its own, with everything that it starts."""

    def __init__(self, name: str, command: list[str], environment: Mapping[str, str], kept: Sequence[str] = ()) -> None:
        """`environment` is added to hone's, or to the variables of it named by `kept`."""
        self._folder = tempfile.mkdtemp(prefix="hone-rpc-")
        variables = {**environment, FOLDER: self._folder}
        self._process = PipedProcess(name, command, variables, Path(self._folder) / "log.txt", kept)
        self._waiting: dict[Any, asyncio.Future[Rpc]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._end = ""
        self._garbage = 0  # lines that were no messages
        self.broken = ""

    async def open(self) -> None:
        try:
            await self._process.launch()
        except ServerFailed as error:
            raise ToolLost(str(error)) from error
        reader, self._writer = await asyncio.open_unix_connection(sock=self._process.socket, limit=LARGEST_MESSAGE)
        self._reading = asyncio.create_task(self._read(reader), name=self._process.name)

    async def request(self, message: Rpc) -> Rpc:
        number = message["id"]
        self._process.shorten_log(MOST_LOG)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self.notify(message)
            return await self._waiting[number]
        except asyncio.CancelledError:
            self._write({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": number}})
            raise
        finally:
            del self._waiting[number]

    async def notify(self, message: Rpc) -> None:
        if self.lost:
            raise ToolLost(self._end)
        self._write(message)
        assert self._writer is not None
        with suppress(ConnectionError):  # the reading task notices, and says why
            await self._writer.drain()

    async def end(self) -> None:
        """End a server that hangs; requests that wait for it raise ToolLost."""
        await self._process.stop(STOP_S)

    async def close(self) -> None:
        reading, self._reading = self._reading, None  # its traceback holds what was received, and this object
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
        try:
            await self._process.stop(STOP_S)
        finally:
            await asyncio.to_thread(remove_folder, self._folder)

    @property
    def lost(self) -> bool:
        return bool(self._end)

    def log(self) -> str:
        return self._process.last_lines()

    def _write(self, message: Rpc) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Settle requests with the server's messages until it ends; then fail those that wait."""
        reason = "it closed its output"
        lines = 0
        try:
            while line := await reader.readline():
                await self._received(line)
                lines += 1
                if lines % LINES_IN_TURN == 0:  # lines that are there already are read without a pause
                    await asyncio.sleep(0)
        except Unread as error:
            reason = str(error)
        except ValueError:
            reason = f"it sent a message of more than {LARGEST_MESSAGE:,} bytes"
        except ConnectionError as error:
            reason = f"the connection broke ({error})"
        await self._process.ends_within(1.0)  # so that the error says how it ended
        ended = self._process.ended
        self._end = f"the server {self._process.name} is lost: " + (f"it ended with {ended}" if ended else reason)
        for one in self._waiting.values():
            if not one.done():
                one.set_exception(ToolLost(self._end))

    async def _received(self, line: bytes) -> None:
        line = line.removeprefix(BYTE_ORDER_MARK)
        try:
            found = await parse_json_apart(line)
        except ValueError:
            self._garbage += 1
            if self._waiting and line.lstrip(b"\xff\xfe \t").startswith((b"{", b"[")):
                self.broken = repr(line[:100])
            if self._garbage <= MOST_WARNINGS:
                LOG.warning("%s wrote a line to its output that is not a message: %.100r", self._process.name, line)
            return
        for message in found if isinstance(found, list) else [found]:  # protocol 2025-03-26 has lists of messages
            if isinstance(message, dict) and "method" in message:
                if "id" in message:
                    self._answer(message)
            elif (
                isinstance(message, dict) and (waiting := self._waiting.get(number_of(message))) and not waiting.done()
            ):
                waiting.set_result(message)

    def _answer(self, request: Rpc) -> None:
        """Answer a request of the server. Raises Unread if it does not read the answers."""
        assert self._writer is not None
        if self._writer.transport.get_write_buffer_size() > MOST_UNREAD:
            raise Unread(f"it asks, and has left more than {MOST_UNREAD:,} bytes of answers unread")
        self._write(answer_to(request))


class Unread(RuntimeError):
    """The server sends requests and does not read what they are answered."""


class HttpTransport:
    """A server that somebody else runs."""

    def __init__(self, name: str, url: str, headers: Mapping[str, str]) -> None:
        self._name = name
        self._url = url
        self._headers = {**headers, "Accept": "application/json, text/event-stream"}
        self._session: aiohttp.ClientSession | None = None
        self.lost = False
        self.broken = ""

    async def open(self) -> None:
        self._session = http_session()

    async def request(self, message: Rpc) -> Rpc:
        async for found in self._post(message):
            if number_of(found) == message["id"] and "method" not in found:
                return found
            if "method" in found and "id" in found:  # the server asks something, such as a ping
                await self.notify(answer_to(found))
        self.lost = True
        raise ToolLost(f"the MCP server {self._name} at {self._url} did not answer {message['method']}")

    async def notify(self, message: Rpc) -> None:
        async for _ in self._post(message):
            pass

    async def close(self) -> None:
        if self._session is None:
            return
        if "Mcp-Session-Id" in self._headers and not self.lost:
            with suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with (
                    asyncio.timeout(STOP_S),
                    self._session.delete(self._url, headers=self._headers, proxy=proxy_of(self._url)),
                ):
                    pass
        await self._session.close()

    def log(self) -> str:
        return ""

    async def _post(self, message: Rpc) -> AsyncIterator[Rpc]:
        """Send a message; the messages of the response."""
        assert self._session is not None
        try:
            async with self._session.post(
                self._url, json=message, headers=self._headers, proxy=proxy_of(self._url)
            ) as response:
                if response.status >= 400:
                    said = (await response.content.read(300)).decode(errors="replace")
                    raise aiohttp.ClientError(f"HTTP status {response.status}: {' '.join(said.split())}")
                if session := response.headers.get("Mcp-Session-Id"):
                    self._headers["Mcp-Session-Id"] = session
                async for found in _messages(response):
                    version = _version_in(found) if message.get("method") == "initialize" else ""
                    if version:
                        self._headers["MCP-Protocol-Version"] = version
                    yield found
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self.lost = True
            reason = f"{type(error).__name__}: {error}"
            raise ToolLost(f"the MCP server {self._name} at {self._url} is lost: {reason}") from error


def number_of(response: Rpc) -> int:
    """The number of the request that a response answers, which some servers write as text or 1.0; 0 for none.

    >>> number_of({"id": 7}), number_of({"id": "7"}), number_of({"id": 7.0}), number_of({"id": True})
    (7, 7, 7, 0)
    """
    found = response.get("id")
    if isinstance(found, str):
        return int(found) if found.isdecimal() and len(found) < 16 else 0
    if isinstance(found, bool) or not isinstance(found, int | float):
        return 0
    return int(found) if abs(found) < 1 << 53 and found == int(found) else 0


def answer_to(request: Rpc) -> Rpc:
    """The answer to a request of the server: hone answers a ping, and offers it nothing else."""
    head = {"jsonrpc": "2.0", "id": request["id"]}
    if request.get("method") == "ping":
        return {**head, "result": {}}
    return {**head, "error": {"code": NO_METHOD, "message": "hone offers servers no methods"}}


def _version_in(message: Rpc) -> str:
    result = message.get("result")
    return str(result.get("protocolVersion", "")) if isinstance(result, dict) else ""


async def _messages(response: aiohttp.ClientResponse) -> AsyncIterator[Rpc]:
    """The messages in a response: one of JSON, or the data of each server-sent event. Raises ValueError."""
    kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    held = bytearray()
    async for piece in response.content.iter_any():
        searched = max(0, len(held) - 3)  # a mark may begin in what came before
        held += piece
        if len(held) > LARGEST_MESSAGE:
            raise ValueError(f"a message of more than {LARGEST_MESSAGE:,} bytes")
        while kind == "text/event-stream" and (event := _first_event(held, searched)) is not None:
            searched = 0
            data = [line[5:].lstrip(b" ") for line in event.splitlines() if line.startswith(b"data:")]
            for message in _objects(await parse_json_apart(b"\n".join(data))) if data else ():
                yield message
    if kind != "text/event-stream" and held.strip():
        for message in _objects(await parse_json_apart(bytes(held))):
            yield message


def _first_event(held: bytearray, searched: int) -> bytes | None:
    """Take the first whole event out of what was received; None if there is none. None ends before `searched`."""
    ends = [(place, len(mark)) for mark in (b"\n\n", b"\r\n\r\n") if (place := held.find(mark, searched)) >= 0]
    if not ends:
        return None
    place, length = min(ends)
    event = bytes(held[:place])
    del held[: place + length]
    return event


def _objects(value: Any) -> list[Rpc]:
    """One message, or a list of some. Raises ValueError for anything else."""
    found = value if isinstance(value, list) else [value]
    for one in found:
        if not isinstance(one, dict):
            raise ValueError(f"a message should be a JSON object, found {type(one).__name__}")
    return found


__all__ = ["LARGEST_MESSAGE", "HttpTransport", "PipeTransport", "Rpc", "Transport"]
