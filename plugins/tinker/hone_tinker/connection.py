"""One session of a service: requests with retries, results by long polls, heartbeats.

    any thread --run, wait--> the connection's own loop --HTTP--> service
                                        |
                                        `-- a heartbeat every 10 s

Every request has a number of its own, so a service that gets it twice runs it once: after a broken connection, 408, 429
and 5xx it is sent again until `timeout_s` has passed, as is a sampling request that the service has forgotten. Nothing
else is repeated.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import os
import threading
import time
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp

from hone.config import ConfigError
from hone.outage import Outage
from hone.processes.http_client import http_session, proxy_of

R = TypeVar("R")
API = "/api/v1"
SDK = "0.38.0"  # the version of the protocol that this client speaks
POLL_S = 45.0  # of one long poll
OPEN_S = 30.0  # for a session at most: a wrong address is noticed soon
HEARTBEAT_S = 10.0
REQUESTS = 512  # at a time; others wait in order
ROUNDS = 16  # of requests that wait for room, in one call: each has its own deadline
FIRST_WAIT_S, LONGEST_WAIT_S = 0.25, 10.0  # between two tries
AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
GONE = 410
FINISH_S = 5.0
KEY = "TINKER_API_KEY"
ADDRESS = "TINKER_BASE_URL"
IS_IT_ONE = "is runtime.backend.url the address of a service of Tinker's protocol?"
IS_IT_A_KEY = f"; is {KEY} a key of this service?"
HINTS = {401: IS_IT_A_KEY, 403: IS_IT_A_KEY}
"""Status that another try would get again -> a question to the user."""
SAMPLE = "asample"  # a service that is started anew has forgotten these requests; others are on its disk
OPENING = "create_session"  # the first request: 404 to a later one is about what it names, such as a lost checkpoint


class ServiceFailed(Outage):
    """A service refused a request, failed, or did not answer in time."""


class _Gone(ServiceFailed):
    """The service has nothing of this name any more."""


@dataclass(slots=True)
class Usage:
    """Tokens that a service has computed."""

    prefilled: int = 0
    sampled: int = 0
    trained: int = 0


class Connection:
    """A session of the service at `url`."""

    def __init__(self, url: str, key: str, timeout_s: float) -> None:
        self.url, self.timeout_s = url, timeout_s
        self.usage = Usage()
        self.sampling_numbers = itertools.count()  # of sampling sessions
        self.model_numbers = itertools.count()
        self._key, self._ended, self._succeeded = key, "", False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"requests to {url}", daemon=True)
        self._thread.start()
        try:
            self.session_id = self.wait(self._begin())
        except ServiceFailed:
            self.wait(self._http.close())
            self._stop()
            raise
        atexit.register(self._finish)

    def wait(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """The result of a coroutine that runs on the connection's loop. Raises ServiceFailed."""
        started = self.start(coroutine)
        try:
            return started.result(ROUNDS * self.timeout_s)
        except TimeoutError as error:
            started.cancel()
            raise ServiceFailed(
                f"{self.url} has not answered all requests of a call after {ROUNDS} x runtime.backend.timeout_s = "
                f"{self.timeout_s:g} s; raise it if the service needs longer"
            ) from error

    def start(self, coroutine: Coroutine[Any, Any, R]) -> Future[R]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def succeeded(self) -> None:
        """The run has ended as it should: the session will be closed with this reason."""
        self._succeeded = True

    async def _begin(self) -> str:
        self._http = http_session()
        self._room = asyncio.Semaphore(REQUESTS)
        body = {"tags": ["hone"], "user_metadata": None, "sdk_version": SDK}
        soon = time.monotonic() + min(self.timeout_s, OPEN_S)
        found = await self._again("POST", OPENING, body, soon)
        session_id = str(field_of(found, "session_id", f"{OPENING} at {self.url}"))
        self._beating = asyncio.create_task(self._beat(session_id), name="heartbeat")
        return session_id

    async def _beat(self, session_id: str) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                await self._once("POST", "session_heartbeat", {"session_id": session_id}, HEARTBEAT_S)
            except _Refused as error:
                if error.status == GONE:
                    self._ended = f"the service has ended the session: {error}"
                    return
            except (ServiceFailed, aiohttp.ClientError, TimeoutError, OSError):
                continue  # the next request says so, if the service is gone

    def _finish(self) -> None:
        """Tell the service that the session is over, so that it can free the models."""
        reason = {"type": "success" if self._succeeded else "interrupted"}

        async def end() -> None:
            self._beating.cancel()
            failures = (_Refused, ServiceFailed, aiohttp.ClientError, TimeoutError, OSError)
            with suppress(*failures):  # the session ends when heartbeats stay out
                await self._once("POST", f"sessions/{self.session_id}/finish", {"reason": reason}, FINISH_S)
            await self._http.close()

        with suppress(TimeoutError):
            self.start(end()).result(2 * FINISH_S)
        self._stop()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(FINISH_S)
        if not self._loop.is_running():
            self._loop.close()

    # ------------------------------------------------------------------------------------------------- requests

    async def post(self, path: str, body: Mapping[str, Any] | bytes) -> Any:
        """The answer to a request. Raises ServiceFailed."""
        return await self.request("POST", path, body)

    async def request(self, method: str, path: str, body: Mapping[str, Any] | bytes | None = None) -> Any:
        """The answer to a request: parsed JSON, or bytes. Raises ServiceFailed.

        `path` may be an address at another host: it gets no key, and its answer is bytes.
        """
        return await self._again(method, path, body, time.monotonic() + self.timeout_s)

    async def result(self, path: str, body: Mapping[str, Any] | bytes) -> Any:
        """The result of a request that the service answers with a promise. Raises ServiceFailed."""
        async with self._room:
            deadline = time.monotonic() + self.timeout_s  # without the time that it waits for room
            called, asked, state = f"{path} at {self.url}", await self._promise(path, body, deadline), ""
            while time.monotonic() < deadline:
                try:
                    found = await self._again("POST", "retrieve_future", asked, deadline, pending=True)
                except _Gone:
                    if path != SAMPLE:
                        raise
                    await asyncio.sleep(FIRST_WAIT_S)
                    asked = await self._promise(path, body, deadline)  # the service was started anew meanwhile
                    continue
                if isinstance(found, bytes):
                    return found
                if not isinstance(found, dict):
                    raise ServiceFailed(f"{called}: its result is {found!r:.100}; {IS_IT_ONE}")
                if "error" in found:
                    raise ServiceFailed(f"{called}: {found['error']}")
                if found.get("type") != "try_again":
                    return found
                state = " ".join(filter(None, (found.get("queue_state"), found.get("queue_state_reason"))))
        raise ServiceFailed(
            f"{called} has no result after {self.timeout_s:g} s"
            f"{f' ({state})' if state else ''}; raise runtime.backend.timeout_s if it needs longer"
        )

    async def _promise(self, path: str, body: Mapping[str, Any] | bytes, deadline: float) -> dict[str, Any]:
        """Send a request; returns the question for its result."""
        promise = await self._again("POST", path, body, deadline)
        request_id = field_of(promise, "request_id", f"{path} at {self.url}")
        return {"request_id": request_id, "allow_metadata_only": False}

    async def _again(
        self, method: str, path: str, body: Mapping[str, Any] | bytes | None, deadline: float, pending: bool = False
    ) -> Any:
        """Try until the deadline; `pending`: 408 is an answer, and the deadline gives the last reason as one."""
        elsewhere = path.startswith(("http://", "https://"))
        what = f"a file at {urlsplit(path).netloc}" if elsewhere else f"{path} at {self.url}"  # its address is a secret
        pause, reason, started = FIRST_WAIT_S, "no answer", time.monotonic()
        while True:
            if self._ended:
                raise ServiceFailed(self._ended)
            left = deadline - time.monotonic()
            if left <= 0 and pending:
                return {"type": "try_again", "queue_state": reason}
            if left <= 0:
                raise ServiceFailed(f"{what}: {reason}, for {time.monotonic() - started:.1f} s")
            try:
                return await self._once(method, path, body, left if elsewhere else min(left, POLL_S))
            except _Refused as error:
                if pending and error.status == 408 and error.body is not None:
                    return error.body
                if error.status not in AGAIN:
                    no_service = error.status == 404 and path == OPENING
                    hint = f"; {IS_IT_ONE}" if no_service else "" if elsewhere else HINTS.get(error.status, "")
                    failed = _Gone if error.status == GONE else ServiceFailed
                    raise failed(f"{what}: status {error.status}: {error}{hint}") from error
                reason = f"status {error.status}: {error}"
            except _Broken as error:
                reason = str(error)
            except aiohttp.ClientConnectorCertificateError as error:
                raise ServiceFailed(
                    f"{what}: its certificate cannot be verified ({error.certificate_error}), so nothing was sent; "
                    "for a certificate of your own, export SSL_CERT_FILE=its file (PEM)"
                ) from error
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                reason = f"{type(error).__name__} {error}".strip()
            await asyncio.sleep(max(0.0, min(pause, deadline - time.monotonic())))
            pause = min(2 * pause, LONGEST_WAIT_S)

    async def _once(self, method: str, path: str, body: Mapping[str, Any] | bytes | None, timeout_s: float) -> Any:
        elsewhere, data = path.startswith(("http://", "https://")), None
        url = path if elsewhere else f"{self.url}{API}/{path}"
        headers = {} if elsewhere else {"Accept": "application/x-protobuf, application/json", "X-API-Key": self._key}
        if isinstance(body, bytes):
            headers["Content-Type"], data = "application/x-protobuf", body
        elif body is not None:
            headers["Content-Type"], data = "application/json", json.dumps(body).encode()
        limit = aiohttp.ClientTimeout(total=timeout_s)
        async with self._http.request(
            method,
            url,
            data=data,
            headers=headers,
            timeout=limit,
            proxy=proxy_of(url),
            allow_redirects=elsewhere,  # the key would go with it
        ) as reply:
            content = await reply.read()
            is_json = reply.content_type == "application/json" and not elsewhere
            text = content.decode(errors="replace")[:500]
            try:
                parsed = json.loads(content) if is_json and content else None
            except ValueError as error:
                if reply.status < 300:  # perhaps the connection broke, and no length said that bytes are missing
                    raise _Broken(f"answered with broken JSON: {text!r:.100}") from error
                parsed = None  # the status counts, and the text of a proxy says why
            if reply.status >= 300:
                raise _Refused(reply.status, parsed, text)
            return parsed if is_json else content


def field_of(answer: Any, name: str, called: str) -> Any:
    """A field of a JSON answer to the request `called`. Raises ServiceFailed if it is not there."""
    if not isinstance(answer, dict) or name not in answer:
        raise ServiceFailed(f"{called} answered {answer!r:.100}, without {name}; {IS_IT_ONE}")
    return answer[name]


class _Broken(aiohttp.ClientPayloadError):
    """An answer that ends in the middle of its JSON, or is none."""


class _Refused(Exception):
    """An answer with a status of 300 or more."""

    def __init__(self, status: int, body: Any, text: str) -> None:
        said = body.get("error") or body.get("detail") if isinstance(body, dict) else None
        super().__init__(str(said or text))
        self.status, self.body = status, body if isinstance(body, dict) else None


_connections: dict[str, Connection] = {}


def connect(url: str, timeout_s: float) -> Connection:
    """The session of this process at a service; the first call opens it. Raises ConfigError without address or key."""
    url = (url or os.environ.get(ADDRESS, "")).rstrip("/")
    if not _is_address(url):
        found = f"found {url!r}" if url else "it is empty, and so is the environment variable " + ADDRESS
        raise ConfigError(
            f"runtime.backend.url should be the address of a service, such as http://127.0.0.1:8123; {found}"
        )
    if url not in _connections:
        key = os.environ.get(KEY, "").strip()
        if not key:
            raise ConfigError(f"the key of {url} is missing: export {KEY}=tml-...")
        if not (key.isascii() and key.isprintable()):
            raise ConfigError(f"{KEY} has characters that no key has; export it again, without line breaks")
        _connections[url] = Connection(url, key, timeout_s)
    return _connections[url]


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port beyond 65,535, half an IPv6 address
        return False


def connected(url: str) -> Connection:
    """The session that `connect` has opened."""
    return _connections[url]
