"""A server in a process of its own, with its log in the run folder.

    adapter --> ServerProcess --> ProcessTree (tree.py) --> supervisor --> server --> its workers

`Process` is the interface that an adapter uses. `ServerProcess` runs on this machine; `hone.workers.hosts.cluster` has
one for other machines. Waiting polls the process every 0.1 s, so an object works on several event loops in turn.
"""

from __future__ import annotations

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from hone.processes.tree import END_S, ProcessTree, Unkillable

GLANCE_S = 0.1  # between two looks at the process
PROBE_S = 10.0  # deadline of one question whether the server is ready
SILENT_S = 90.0  # by then Ray reports a machine that stopped answering as lost: it waits about a minute
TAIL_BYTES = 262_144


class ServerFailed(RuntimeError):
    """A server did not start, or died; the message names it and shows the last lines of its log."""


class Process(ABC):
    """One server, on this machine or another: `start`, `alive`, `wait_dead`, `stop`."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """`environment` is added to the starting process's own. Put secrets there, never into `command`."""
        self.name = name
        self.log = log
        self._command = list(command)
        self._environment = dict(environment)

    @abstractmethod
    async def launch(self) -> None:
        """Start the process without waiting until it is ready. Raises ServerFailed."""

    @abstractmethod
    async def stop(self, timeout_s: float = 10.0) -> None:
        """End the server: SIGTERM, and SIGKILL after `timeout_s` seconds. Returns when its whole tree has ended.

        Does nothing if it is not running. Raises ServerFailed if a process cannot be killed.
        """

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Return whether it runs."""

    @property
    @abstractmethod
    def ended(self) -> str:
        """Return the end of the process: `exit status 3`, `signal SIGKILL`; empty if it runs or was never started."""

    @abstractmethod
    def last_lines(self, n: int = 20) -> str:
        """The last `n` lines of the log since the last start."""

    async def start(self, ready: Callable[[], Awaitable[bool]], timeout_s: float) -> None:
        """Start the server and wait until `ready()` returns True; an OSError of `ready` means not yet.

        Raises ServerFailed, with nothing left running, if it dies or is not ready after `timeout_s` seconds.
        """
        if self.alive:
            raise RuntimeError(f"server {self.name} is already running")
        await self.launch()
        deadline = time.monotonic() + timeout_s
        try:
            while not await self._is_ready(ready, deadline):
                if not self.alive:
                    raise ServerFailed(f"server {self.name} ended with {self.ended} while it started{self._tail()}")
                if time.monotonic() > deadline:
                    raise ServerFailed(f"server {self.name} was not ready after {timeout_s:g} s{self._tail()}")
                await asyncio.sleep(GLANCE_S)
        except BaseException:
            await self.stop(1.0)
            raise

    async def _is_ready(self, ready: Callable[[], Awaitable[bool]], deadline: float) -> bool:
        left = max(0.1, min(PROBE_S, deadline - time.monotonic()))
        try:
            return await asyncio.wait_for(ready(), left) and self.alive
        except OSError:  # nothing listens there yet, or no answer in time
            return False

    async def wait_dead(self) -> None:
        """Wait until the server is not running."""
        while self.alive:
            await asyncio.sleep(GLANCE_S)

    async def ends_within(self, seconds: float) -> bool:
        """Wait for the server's end for at most `seconds`; returns whether it ended."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.wait_dead(), seconds)
        return not self.alive

    def _tail(self) -> str:
        lines = self.last_lines()
        return f"; the last lines of {self.log}:\n{lines}" if lines else f"; it wrote nothing to {self.log}"


class ServerProcess(Process):
    """A server on this machine. It can be started again after it ended."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        super().__init__(name, command, environment, log)
        self._tree: ProcessTree | None = None
        self._log_start = 0

    async def launch(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            try:
                self._tree = self._start(log)
            except OSError as error:
                raise ServerFailed(f"server {self.name} cannot be started: {error}") from error

    def _start(self, log: IO[bytes]) -> ProcessTree:
        return ProcessTree(self._command, self._environment, log)

    async def stop(self, timeout_s: float = 10.0) -> None:
        if self._tree is None:
            return
        try:
            for _ in self._tree.ending(timeout_s):
                await asyncio.sleep(GLANCE_S / 2)
        except Unkillable as error:
            raise ServerFailed(f"server {self.name} has {error}") from error

    @property
    def alive(self) -> bool:
        return self._tree is not None and self._tree.alive

    @property
    def ended(self) -> str:
        return "" if self._tree is None else self._tree.ended

    def process_ids(self) -> list[int]:
        """The server's process and everything below it; empty if it is not running."""
        return [] if self._tree is None else self._tree.process_ids()

    def last_lines(self, n: int = 20) -> str:
        return tail_of(self.log, n, self._log_start)


def tail_of(path: Path, n: int, start: int = 0) -> str:
    """The last `n` lines of a file after its byte `start`; empty if the file does not exist."""
    if not path.is_file():
        return ""
    with path.open("rb") as log:
        end = log.seek(0, os.SEEK_END)
        log.seek(max(start, end - TAIL_BYTES))
        text = log.read().decode("utf-8", errors="replace")
    return "\n".join(text.rstrip().splitlines()[-n:])


__all__ = ["END_S", "SILENT_S", "Process", "ServerFailed", "ServerProcess", "tail_of"]
