"""A server that was started elsewhere (`hone rollout serve`), as the run that attaches to it sees it: `AttachedHost`.

The run never starts or ends it. Its process is alive, for the run, while the connection by which it attached is open
(`hone.rollout.servers.front`); when that ends, the server is lost.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from hone.config import ConfigError
from hone.processes.child import Process, ServerFailed
from hone.rollout.servers.front import ATTACH, keep_alive
from hone.rollout.servers.host import Launch, Site
from hone.rollout.servers.relay import connector_to
from hone.rollout.settings import split_address

TOKEN = "HONE_ROLLOUT_TOKEN"  # environment variable: the secret of servers and of runs that attach to them
SHORTEST_TOKEN = 16
ANSWER_S = 30.0  # deadline of an answer to `attach`
LONGEST_ANSWER = 1 << 20  # bytes
KEYS = {  # what a server serves, and what says so in a run file
    "hone": "the version of hone",
    "backend": "rollout.backend",
    "model": "model",
    "vocabulary": "model.tokenizer",
    "context": "model.use.context",
    "dtype": "actor.compute_dtype",
    "tensor_parallel": "rollout.tensor_parallel",
    "ranks": "the number of ranks (rollout.tensor_parallel, and pipeline and data parallel in rollout.engine)",
    "keep_cache": "asynchrony.new_weights",
    "adapter": "actor.lora",
    "adapters": "adapters",
    "routed_layers": "actor.moe.routing_replay",
}


def shared_token(environment: Mapping[str, str]) -> str:
    """The token of servers that were started elsewhere. Raises ConfigError without one."""
    token = environment.get(TOKEN, "")
    if len(token) < SHORTEST_TOKEN or not token.isalnum():
        raise ConfigError(
            f"{TOKEN} should be a secret of at least {SHORTEST_TOKEN} letters and digits, the same for the servers "
            f'and the run, found {len(token)} characters; make one: export {TOKEN}=$(python -c "import secrets; '
            'print(secrets.token_hex(32))")'
        )
    return token


class AttachedHost:
    """The machine of a server that somebody else started."""

    is_shared = False

    def __init__(self, address: str, token: str, expected: Mapping[str, Any]) -> None:
        """`expected`: what the server has to serve, by the names of `KEYS`."""
        self.address = address
        self._host, self._port = split_address(address)
        self._token = token
        self._expected = expected

    @property
    def machine(self) -> str:
        is_here = self._host == "localhost" or self._host.startswith("127.") or self._host == "::1"
        return "" if is_here else self._host

    @property
    def driver(self) -> str:
        """The address at which its machine reaches this one."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            asked.connect((self._host, self._port))  # sends nothing: the kernel chooses the address
            found: str = asked.getsockname()[0]
        return found

    async def open(self) -> Site:
        return Site(Path(), "")

    def process(self, name: str, launches: Sequence[Launch], log: Path) -> Process:
        return AttachedProcess(name, log, self.address, self._token, self._expected)

    def connector(self, **options: Any) -> aiohttp.BaseConnector:
        return connector_to(self._host, self._port, **options)

    async def close(self) -> None:
        """Nothing was made."""


class AttachedProcess(Process):
    """The connection by which this run has the server."""

    def __init__(self, name: str, log: Path, address: str, token: str, expected: Mapping[str, Any]) -> None:
        super().__init__(name, [], {}, log)
        self._address = address
        self._token = token
        self._expected = expected
        self._connection: socket.socket | None = None
        self._ended = ""

    async def launch(self) -> None:
        """Attach. Raises ServerFailed if nothing answers there, or it refuses, or it serves something else."""
        self._ended = ""
        try:
            self._connection = await asyncio.to_thread(self._attach)
        except OSError as error:
            raise ServerFailed(
                f"no rollout server answers at {self._address} (rollout.addresses): {error}; start one there: "
                f"hone rollout serve RUN_FILE {self._address}"
            ) from error

    def _attach(self) -> socket.socket:
        connection = socket.create_connection(split_address(self._address), ANSWER_S)
        try:
            connection.sendall(f"{ATTACH} {self._token}\n".encode())
            self._check(_answer(connection, self._address))
            keep_alive(connection)
            connection.setblocking(False)
        except BaseException:
            connection.close()
            raise
        return connection

    def _check(self, answer: Mapping[str, Any]) -> None:
        where = f"rollout.addresses: {self._address}"
        if "serves" not in answer:
            raise ServerFailed(f"{where} refuses this run: {answer.get('error')!s:.1000}")
        served = answer["serves"]
        if not isinstance(served, dict):
            raise ServerFailed(f"{where} is not a rollout server of this version of hone: it serves {served!r:.100}")
        for name, key in KEYS.items():
            here, there = self._expected[name], served.get(name)
            if here != there:
                raise ServerFailed(
                    f"{where} serves something else than this run needs: {key} is {_difference(there, here)}; start it "
                    "with the run file of this run"
                )

    @property
    def alive(self) -> bool:
        if self._connection is None:
            return False
        try:
            ended = self._connection.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return True
        except OSError:
            ended = True
        if ended:
            self._close("the loss of its connection")
        return not ended

    @property
    def ended(self) -> str:
        return "" if self.alive else self._ended

    def last_lines(self, n: int = 20) -> str:
        """Its log is on its own machine."""
        return ""

    async def stop(self, timeout_s: float = 10.0) -> None:
        self._close("the end of this run")

    def _close(self, why: str) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._ended = why
            connection.close()

    def _tail(self) -> str:
        return f" at {self._address}"


def _answer(connection: socket.socket, address: str) -> Mapping[str, Any]:
    """The one line that answers `attach`. Raises ServerFailed for anything else, TimeoutError if it is late."""
    found, deadline = b"", time.monotonic() + ANSWER_S
    while not found.endswith(b"\n") and len(found) < LONGEST_ANSWER and (piece := connection.recv(65_536)):
        found += piece
        connection.settimeout(max(deadline - time.monotonic(), 0.001))  # of the whole answer, not of each piece
    try:
        answer = json.loads(found)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise ServerFailed(f"rollout.addresses: what listens at {address} is not a rollout server of hone")
    return answer


def _difference(there: Any, here: Any) -> str:
    """Two values, or the first entry in which two mappings differ."""
    if isinstance(there, dict) and isinstance(here, dict):
        key = next(key for key in sorted({*there, *here}) if there.get(key, here) != here.get(key, there))
        return f"another: its {key} is {there.get(key)!r:.200} there and {here.get(key)!r} here"
    return f"{there!r:.200} there and {here!r} here"


__all__ = ["TOKEN", "AttachedHost", "AttachedProcess", "shared_token"]
