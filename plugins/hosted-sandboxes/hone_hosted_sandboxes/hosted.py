"""Base of the sandboxes of all services: a machine for each sandbox, and hone's attendant in it.

    HostedSandbox.run --> Machine.write (a zip: hone's code and the request) --> Machine.execute (python3 ZIP) --> reply

A machine is created by the first program of a sandbox and removed by `close`. It also has a lifetime, which the service
holds: if hone is killed, its machines are gone `IDLE_S` seconds later.

Who caused it? The attendant in the machine holds the limits and replies. A program that ends without a reply has killed
the attendant or exhausted the machine, and one that outlives the service's deadline has stopped it: both are results of
the program. An error of the service, its silence, or a reply that is no reply, is a loss.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import aiohttp

from hone.processes.http_client import http_session, proxy_of
from hone.processes.untrusted_json import parse_json_apart
from hone.sandboxes.attendant import ran_of, request_of
from hone.sandboxes.base import Limits, Ran, SandboxLost, SandboxRefused, check_request, seat, seats
from hone_hosted_sandboxes.inside import bundle_of, reply_in

IDLE_S = 900.0  # life of a machine after its last program: an episode may wait this long between two
REQUEST_S = 60.0  # of one request that runs no program
CREATE_S = 180.0  # until a machine has started
INSIDE_S = 45.0  # beyond a program's own deadline: for the attendant, as on hone's machine
GRACE_S = 30.0  # beyond that: for the service and the network
MOST_BYTES = 1 << 28  # of one answer
WAITS_S = (1.0, 2.0, 4.0, 8.0)  # before a machine is asked for again; then the last one repeats
BUSY = (429, 502, 503, 504)
NO_PYTHON = (126, 127)  # the statuses of a shell that cannot run a command
KILLED = -9  # the status of a program that took its attendant along
KEYS = {"e2b": "E2B_API_KEY", "daytona": "DAYTONA_API_KEY"}  # service -> environment variable with its key
LOG = logging.getLogger(__name__)


class Busy(SandboxLost):
    """The service has no machine now; it may have one later."""


@dataclass(frozen=True, slots=True)
class Executed:
    """Result of a command in a machine of a service: output, status, whether it was late."""

    output: str = ""
    status: int = 0
    late: bool = False  # the service ended it at the deadline


class Machine(Protocol):
    """A machine of a service that has started. Its methods raise SandboxLost."""

    async def write(self, path: str, content: bytes) -> None:
        """Write a file, as the user who executes."""

    async def execute(self, argv: Sequence[str], timeout_s: float) -> Executed:
        """Run a command to its end; the service ends it after `timeout_s` seconds."""

    async def keep(self, seconds: float) -> None:
        """Let the machine live for at least so long from now on."""

    async def remove(self) -> None:
        """Remove the machine, or do nothing if the service has removed it."""


class Service(Protocol):
    """Makes machines."""

    name: str

    async def create(self, seconds: float) -> Machine:
        """A machine that lives for at least so long. Raises Busy or SandboxLost; then none is left behind."""

    async def close(self) -> None:
        """Close the connections."""


class HostedSandboxes:
    """Sandboxes of a service (`hone.sandboxes.base.SandboxHost`)."""

    def __init__(self, service: Service, limits: Limits) -> None:
        self.service = service
        self.limits = limits
        self.seats = asyncio.Semaphore(seats(limits))
        self._opened: set[HostedSandbox] = set()

    async def start(self) -> str:
        sandbox = self.open()
        try:
            ran = await sandbox.run(["python", "-c", ""], timeout_s=REQUEST_S)
        finally:
            await sandbox.close()
        if not ran.ok:
            raise SandboxLost(f"{self.service.name}: an empty program ended with status {ran.status} {ran.limit}")
        return f"what a machine of {self.service.name} stops, and memory, processes, disk, time"

    def open(self) -> HostedSandbox:
        sandbox = HostedSandbox(self)
        self._opened.add(sandbox)
        return sandbox

    def closed(self, sandbox: HostedSandbox) -> None:
        """Forget a sandbox whose machine is removed."""
        self._opened.discard(sandbox)

    async def close(self) -> None:
        for sandbox in tuple(self._opened):
            await sandbox.close()
        await self.service.close()

    async def create(self, seconds: float) -> Machine:
        """A machine, also from a service that is busy now. Raises SandboxLost."""
        ends, waits = time.monotonic() + CREATE_S, iter(WAITS_S)
        while True:
            try:
                return await self.service.create(seconds)
            except Busy as error:
                wait = next(waits, WAITS_S[-1])
                if time.monotonic() + wait > ends:
                    raise SandboxLost(f"{error} (for {CREATE_S:g} s)") from error
            await asyncio.sleep(wait)


class HostedSandbox:
    """One machine (`hone.sandboxes.base.Sandbox`), created by the first program."""

    def __init__(self, host: HostedSandboxes) -> None:
        self._host = host
        self._one = asyncio.Lock()
        self._folder = f"hone-{secrets.token_hex(8)}"
        self._machine: asyncio.Task[Machine] | None = None
        self._ends = 0.0

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        files: Mapping[str, bytes] = {},
        wanted: Sequence[str] = (),
        timeout_s: float,
    ) -> Ran:
        """As `Sandbox.run`: one program at a time."""
        check_request(argv, (*files, *wanted))
        request = request_of(argv, stdin, files, wanted, timeout_s)
        async with self._one, seat(self._host.seats):
            machine = await self._living(timeout_s + INSIDE_S + GRACE_S)
            word, path = secrets.token_hex(16), f"/tmp/hone-{secrets.token_hex(8)}.pyz"
            own = {"word": word, "folder": self._folder, "limits": asdict(self._host.limits)}
            began = time.monotonic()
            try:
                async with asyncio.timeout(REQUEST_S + timeout_s + INSIDE_S + GRACE_S):
                    await machine.write(path, await asyncio.to_thread(bundle_of, {**own, **request}))
                    done = await machine.execute(["python3", path], timeout_s + INSIDE_S)
            except TimeoutError as error:
                raise self._lost(f"no answer within {time.monotonic() - began:.0f} s") from error
        return self._ran(done, word, time.monotonic() - began)

    def _ran(self, done: Executed, word: str, seconds: float) -> Ran:
        try:
            reply = reply_in(done.output, word)
            if reply is not None and "lost" not in reply:
                return ran_of(reply)
        except (KeyError, TypeError, ValueError) as error:
            raise self._lost(f"a reply that is no reply: {error!r}") from error
        if reply is not None:
            raise self._lost(str(reply["lost"]))
        if done.status in NO_PYTHON:
            raise self._lost(f"python3 cannot be run in its image: {done.output.strip()[-200:]}")
        return Ran(status=KILLED, stdout=b"", stderr=b"", seconds=seconds, limit="time" if done.late else "")

    async def _living(self, seconds: float) -> Machine:
        """The machine, which lives for at least so long from now on."""
        now = time.monotonic()
        if self._machine is None:
            self._ends = now + seconds + IDLE_S
            self._machine = asyncio.create_task(self._host.create(seconds + IDLE_S))
        machine = await asyncio.shield(self._machine)  # cancelled, it might leave a machine that nobody knows
        if now + seconds > self._ends:
            await machine.keep(seconds + IDLE_S)
            self._ends = now + seconds + IDLE_S
        return machine

    async def close(self) -> None:
        """Remove the machine. The service removes one that cannot be reached, at the end of its life."""
        creating, self._machine = self._machine, None
        self._host.closed(self)
        if creating is None:
            return
        try:
            machine = await creating
        except SandboxLost:
            return  # there is none
        try:
            await machine.remove()
        except SandboxLost as error:
            LOG.warning("a sandbox was not removed and lives until its service ends it: %s", error)

    def _lost(self, what: str) -> SandboxLost:
        return SandboxLost(f"{self._host.service.name}: {what}")


class Api:
    """Requests to a service over HTTP. The key is in their headers and in no message."""

    def __init__(self, name: str, key: str) -> None:
        self.name = name
        self._key = key
        self._session: aiohttp.ClientSession | None = None

    async def ask(
        self, method: str, url: str, *, also: Collection[int] = (), timeout_s: float = REQUEST_S, **more: Any
    ) -> tuple[int, bytes]:
        """Status and body: 2xx, or a status in `also`. Raises Busy for 429, 502, 503 and 504, else SandboxLost."""
        self._session = self._session or http_session()
        where = f"{self.name}: {method} {url.partition('?')[0]}"
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(method, url, allow_redirects=False, proxy=proxy_of(url), **more) as answer,
            ):
                body = bytearray()
                async for piece in answer.content.iter_any():
                    body += piece
                    if len(body) > MOST_BYTES:
                        raise SandboxLost(f"{where}: an answer of more than {MOST_BYTES:,} bytes")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise SandboxLost(self._hidden(f"{where}: {type(error).__name__}: {error}")) from error
        if answer.status // 100 == 2 or answer.status in also:
            return answer.status, bytes(body)
        text = self._hidden(f"{where} answered {answer.status}: {body[:300].decode('utf-8', 'replace')}")
        if answer.status in (401, 403):
            text += f" (the key is in the environment variable {KEYS[self.name]})"
        raise Busy(text) if answer.status in BUSY else SandboxLost(text)

    async def ask_json(self, method: str, url: str, **more: Any) -> dict[str, Any]:
        """The JSON object that the service answers. Raises as `ask`."""
        _, body = await self.ask(method, url, **more)
        return await self.read_json(body, url)

    async def read_json(self, body: bytes, url: str) -> dict[str, Any]:
        """The JSON object in an answer. Raises SandboxLost."""
        try:
            found = await parse_json_apart(body)
        except ValueError as error:
            raise SandboxLost(f"{self.name}: {url} answered with text that is not JSON: {body[:80]!r}") from error
        if not isinstance(found, dict):
            raise SandboxLost(f"{self.name}: {url} answered with {body[:80]!r}, expected a JSON object")
        return found

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _hidden(self, text: str) -> str:
        return text.replace(self._key, "...")


def key_found(name: str) -> str:
    """Return whether the key of a service is in the environment, as a sentence."""
    return f"{KEYS[name]} is {'set; the service was not asked' if os.environ.get(KEYS[name]) else 'not set'}"


def key_of(name: str) -> str:
    """The key of a service, from the environment. Raises SandboxRefused."""
    if not (key := os.environ.get(KEYS[name], "").strip()):
        raise SandboxRefused(f"{name} needs its key in the environment variable {KEYS[name]}, which is not set")
    return key


def address(name: str, url: str, default: str) -> str:
    """The address of a service without a slash at its end. Raises SandboxRefused."""
    if not (url or default).startswith(("http://", "https://")):
        raise SandboxRefused(f"{name}: the url should begin with http:// or https://, such as {default}; found {url!r}")
    return (url or default).rstrip("/")


__all__ = [
    "Api",
    "Busy",
    "Executed",
    "HostedSandbox",
    "HostedSandboxes",
    "Machine",
    "Service",
    "address",
    "key_found",
    "key_of",
]
