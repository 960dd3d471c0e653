"""One server process and the HTTP connection to its private socket: `ServerConnection`.

start     a private folder from the host, the process, wait until it is ready, check that it asks for the token
get, post one HTTP request with the run's token; a failure says whether the server is lost, late or refuses
close     end the process with everything it started, remove the folder
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from hone.processes.child import SILENT_S, Process, ServerFailed
from hone.processes.descriptors import OutOfDescriptors, is_exhausted, when_free
from hone.rollout.base import ReplicaLost, ServerSpec
from hone.rollout.servers.host import Launch, Site
from hone.rollout.settings import CONTROLS

CONTROL_S = 60.0  # deadline of a control request that has nothing to wait for
READY_S = 5.0  # deadline of each of the two requests that show whether a server is ready
GRACE_S = 10.0  # between SIGTERM and SIGKILL
DYING_S = 5.0  # a server whose engine has failed ends within this time
UNAWARE_S = 1.0  # within this time a server that still calls itself healthy learns that its engine has died, and ends
LOG_LINES = 2_000  # of the server's log, searched for the error that began its end
CAUSE = re.compile(r"(?:^|\] |\) )((?:[\w.]*(?:Error|Exception)|[\w. ]+: error): .+|[\w.]+(?:Error|Exception)$)")
CONSEQUENCE = re.compile(  # an error that only points to another one
    r"[Ss]ee (?:the )?(?:stack trace|root cause)|CalledProcessError: |Error raised in subprocess"
)

LaunchFn = Callable[[Site], Launch]
"""Command and environment of a server; the site gives its private folder and its interpreter."""


class ServerConnection:
    """The process of one server at a time, and requests to it."""

    def __init__(self, spec: ServerSpec, health: str) -> None:
        """`health`: a path that answers 200 to a GET when the server is ready."""
        self.name = spec.name
        self.process: Process | None = None
        self.folder: Path | None = None  # private; with the server's socket
        self._host = spec.host
        self._token = spec.token
        self._log = spec.logs / f"{spec.name}.log"
        self._health = health
        self._most = spec.settings.requests_per_replica + CONTROLS
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # of the session
        self._open: set[asyncio.Timeout] = set()  # of the requests that run

    @property
    def alive(self) -> bool:
        """Return whether the process runs."""
        return self.process is not None and self.process.alive

    async def start(self, launch: LaunchFn, timeout_s: float) -> None:
        """Start the server and wait until it is ready. Raises ServerFailed with the last lines of its log."""
        self.process = None
        try:
            await when_free(lambda: self._launch(launch, timeout_s), timeout_s)
        except ServerFailed as error:
            cause = first_error(self.process.last_lines(LOG_LINES)) if self.process is not None else ""
            await self.close()
            raise ServerFailed(f"{cause}{error}") from error
        except BaseException:
            await self.close()
            raise

    async def _launch(self, launch: LaunchFn, timeout_s: float) -> None:
        if self.folder is None:
            self.folder = (site := await self._host.open()).folder
            launches = [launch(one) for one in (site, *site.others)] if site.python else []
            self.process = self._host.process(self.name, launches, self._log)
        assert self.process is not None
        await self.process.start(self._is_ready, timeout_s)

    async def _is_ready(self) -> bool:
        """Return whether it answers and asks for the token. Raises RuntimeError if it does not, OSError: not yet."""
        timeout = aiohttp.ClientTimeout(total=READY_S)
        url = f"http://server{self._health}"
        try:
            await self.get(self._health, READY_S)
            async with self.session().get(url, headers={"Authorization": ""}, timeout=timeout) as reply:
                status = reply.status
        except (ReplicaLost, RuntimeError, aiohttp.ClientError) as error:
            raise ConnectionError(str(error)) from error
        if status != 401:
            raise RuntimeError(f"server {self.name} answers without the run's token (status {status})")
        return True

    async def close(self) -> None:
        """End the server with everything it started; again is fine. Requests that run raise ReplicaLost now."""
        for request in self._open:  # aiohttp would leave those waiting whose reply has begun
            if not request.expired():  # it is, if this is the second call
                request.reschedule(0.0)
        if self._session is not None and not self._session.closed:
            await self._session.close()
        self._session = None
        try:
            if self.process is not None:
                await self.process.stop(GRACE_S)
        finally:
            if self.folder is not None:
                self.folder = None
                await self._host.close()

    # ------------------------------------------------------------------------------------------------ requests

    async def get(self, path: str, timeout_s: float = CONTROL_S) -> dict[str, Any]:
        return await self._request("GET", path, None, timeout_s)

    async def beat(self) -> None:
        """Wait until the health route answers; raises as `get` does, but does not wait for a free descriptor."""
        await self._send("GET", self._health, None, CONTROL_S)

    async def post(self, path: str, body: Any = None, timeout_s: float = CONTROL_S) -> dict[str, Any]:
        return await self._request("POST", path, body, timeout_s)

    async def _request(self, method: str, path: str, body: Any, timeout_s: float) -> dict[str, Any]:
        """Send one request and return its JSON. Waits while this process has no free file descriptor.

        Raises ReplicaLost, TimeoutError, ValueError (status 400), RuntimeError (other statuses).
        """
        return await when_free(lambda: self._send(method, path, body, timeout_s), timeout_s)

    async def _send(self, method: str, path: str, body: Any, timeout_s: float) -> dict[str, Any]:
        process = self.process  # the one asked: by the time the reply comes, another may have been started
        ending = asyncio.timeout(None)
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        url = f"http://server{path}"
        try:
            async with (
                self._ended_by_close(ending),
                self.session().request(method, url, json=body, timeout=timeout) as reply,
            ):
                status, text = reply.status, await reply.text()
                found = await reply.json() if "json" in reply.headers.get("content-type", "") else {"text": text}
        except TimeoutError as error:
            if ending.expired():
                raise ReplicaLost(f"replica {self.name} was ended during {path}") from error
            message = f"replica {self.name} did not answer {path} within {timeout_s:g} s"
            if self._host.machine and process is not None and await process.ends_within(SILENT_S):
                raise ReplicaLost(f"{message}{self._last_words()}") from error
            raise TimeoutError(message) from error
        except (aiohttp.ClientError, OSError) as error:
            if is_exhausted(error):  # says nothing about the replica
                raise OutOfDescriptors(f"no connection to replica {self.name}: {error}") from error
            raise ReplicaLost(f"replica {self.name} was lost during {path}: {error!r}{self._last_words()}") from error
        if status == 200:
            return found if isinstance(found, dict) else {}
        message = f"replica {self.name} refused {path} (status {status}): {error_text(found, text)}"
        if status == 400:
            raise ValueError(message)
        if status >= 500 and (process is None or await self._is_ending(process)):
            raise ReplicaLost(f"{message}{self._last_words()}")
        raise RuntimeError(message)

    @asynccontextmanager
    async def _ended_by_close(self, ending: asyncio.Timeout) -> AsyncIterator[None]:
        """Let `close` end what runs inside; what comes after it has a deadline of its own."""
        async with ending:
            self._open.add(ending)
            try:
                yield
            finally:
                self._open.discard(ending)

    def session(self) -> aiohttp.ClientSession:
        """The client session of the running event loop. Raises ReplicaLost if no server was started."""
        loop = asyncio.get_running_loop()
        if self._session is None or self._session.closed or self._loop is not loop:
            if self.folder is None:
                raise ReplicaLost(f"replica {self.name} does not run")
            self._loop = loop
            # A connection per request: a server may close one that is kept at the moment in which it is used again.
            # Requests beyond the limit wait for a connection here, within their deadline.
            connector = self._host.connector(limit=self._most, force_close=True)
            headers = {"Authorization": f"Bearer {self._token}"}
            self._session = aiohttp.ClientSession(headers=headers, connector=connector)
        return self._session

    async def _is_ending(self, process: Process) -> bool:
        """Return whether the server ends within a moment, because its engine has died."""
        timeout = aiohttp.ClientTimeout(total=DYING_S)
        patience = DYING_S
        with suppress(aiohttp.ClientError, OSError, ReplicaLost):
            async with self.session().get(f"http://server{self._health}", timeout=timeout) as reply:
                if reply.status == 200 and self.process is process:
                    patience = UNAWARE_S
        return await process.ends_within(patience)

    def _last_words(self) -> str:
        """Return the end of a server with the first error in its log; empty while it runs."""
        if self.process is None or self.process.alive:
            return ""
        cause = first_error(self.process.last_lines(LOG_LINES))
        after = f", after {cause.strip()}" if cause else ""
        where = f" (its log: {self._log})" if self._log.is_file() else ""
        return f"; it ended with {self.process.ended}{after}{where}"


def first_error(log: str) -> str:
    """The first error in a log, with a line end: the last lines only tell its consequences.

    A message of several lines, such as pydantic's, has its second line too.
    """
    lines = log.splitlines()
    for number, line in enumerate(lines):
        found = CAUSE.search(line)
        if found is None or CONSEQUENCE.search(line):
            continue
        indented = f"{line[: found.start(1)]}  "
        following = lines[number + 1] if number + 1 < len(lines) else ""
        more = following.removeprefix(indented) if following.startswith(indented) else ""
        more = "" if more.startswith("File ") else more  # a frame of the next traceback
        return f"{found[1]}{': ' if more else ''}{more.strip()}\n"
    return ""


def error_text(found: Any, text: str) -> str:
    """The message in the reply to a request that failed, on one line."""
    error = found.get("error") or found.get("message") if isinstance(found, dict) else None
    if isinstance(error, dict):
        error = error.get("message")
    return " ".join(str(error or (found.get("detail") if isinstance(found, dict) else "") or text).split())[:2000]


__all__ = ["CONTROL_S", "LaunchFn", "ServerConnection"]
