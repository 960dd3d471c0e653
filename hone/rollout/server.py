"""A server in a process of its own: started, watched, stopped, and never left behind.

    hone: ServerProcess --pipe--> keeper (hone/rollout/keeper.py) --> server --> its workers
                        <--------- exit status ----------------- all of them gone

`Process` is what an adapter holds of its server, `ServerProcess` one of this machine. It has a session of its own,
writes to a log in the run folder, and ends with its whole tree of processes: when `stop` is called, when it crashes,
and when hone itself is killed. Waiting is done by glances at the process, so an object may be used from one event loop
after another.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from hone.rollout.keeper import KILL_S, ORPHANED_S, UNKILLABLE, command_line, descendants, keepers_of, session_of

GLANCE_S = 0.1  # between two looks at the process
PROBE_S = 10.0  # deadline of one question whether the server is ready
END_S = 15.0  # what killing a tree may take beyond the time that the server was given
SILENT_S = 90.0  # a machine that answers no longer is known to be lost by then: Ray gives one up after about a minute
TAIL_BYTES = 65_536


class ServerFailed(RuntimeError):
    """A server did not start, or died; the message names it and shows the last lines of its log."""


class Process(ABC):
    """One server, wherever it runs: `start`, `alive`, `wait_dead`, `stop`."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """`environment` is added to that of the process that starts it; secrets belong there, never into `command`."""
        self.name = name
        self.log = log
        self._command = list(command)
        self._environment = dict(environment)

    @abstractmethod
    async def launch(self) -> None:
        """Start it, and wait for nothing. Raises ServerFailed."""

    @abstractmethod
    async def stop(self, timeout_s: float = 10.0) -> None:
        """End the server: SIGTERM, and after `timeout_s` seconds SIGKILL; returns when its whole tree is gone.

        Nothing happens if it is not running. Raises ServerFailed if a process cannot be killed.
        """

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether it runs."""

    @property
    @abstractmethod
    def ended(self) -> str:
        """How it ended: `exit status 3`, `signal SIGKILL`; empty if it runs or never did."""

    @abstractmethod
    def last_lines(self, n: int = 20) -> str:
        """The last `n` lines that this server wrote since its last start."""

    async def start(self, ready: Callable[[], Awaitable[bool]], timeout_s: float) -> None:
        """Start the server and return when `ready()` says so; an OSError of `ready` means not yet.

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
        """Return when the server is not running (any more), a tenth of a second late at most."""
        while self.alive:
            await asyncio.sleep(GLANCE_S)

    async def ends_within(self, seconds: float) -> bool:
        """Wait so long for its end; whether it came."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.wait_dead(), seconds)
        return not self.alive

    def _tail(self) -> str:
        lines = self.last_lines()
        return f"; the last lines of {self.log}:\n{lines}" if lines else f"; it wrote nothing to {self.log}"


class ServerProcess(Process):
    """A server of this machine; it may be started again after its end."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        super().__init__(name, command, environment, log)
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self._swept = False

    # -------------------------------------------------------------------------------------------- start and stop

    async def launch(self) -> None:
        if self._process is not None:
            self._release(self._process)
        self._swept = False
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            try:
                self._process = subprocess.Popen(
                    command_line(self._command),
                    env={**os.environ, **self._environment},
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as error:
                raise ServerFailed(f"server {self.name} cannot be started: {error}") from error

    async def stop(self, timeout_s: float = 10.0) -> None:
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            self._tell(process, f"stop {timeout_s:g}\n")
            deadline = time.monotonic() + timeout_s + END_S
            while process.poll() is None and time.monotonic() < deadline:
                await asyncio.sleep(GLANCE_S / 2)
        left = await self._sweep(process)
        self._release(process)
        if left or process.returncode == UNKILLABLE:
            raise ServerFailed(f"server {self.name}: processes of it cannot be killed {left or ''}".rstrip())

    @staticmethod
    def _tell(process: subprocess.Popen[bytes], line: str) -> None:
        pipe: IO[bytes] | None = process.stdin
        assert pipe is not None
        with suppress(BrokenPipeError, ValueError):  # the keeper has ended, or the pipe is closed
            pipe.write(line.encode())
            pipe.flush()

    async def _sweep(self, process: subprocess.Popen[bytes]) -> list[int]:
        """What the keeper does at its end, for a keeper that was killed or hangs; process ids that are left.

        Where its stand-in alone was killed, it does so itself, and is given the time. Done once: later the id of the
        session may belong to somebody else.
        """
        if self._swept or (process.poll() is not None and process.returncode >= 0):
            return []
        self._swept = True
        deadline = time.monotonic() + ORPHANED_S + KILL_S
        while process.poll() is not None and keepers_of(process.pid) and time.monotonic() < deadline:
            await asyncio.sleep(GLANCE_S / 2)
        process.kill()
        deadline = time.monotonic() + END_S
        while (left := session_of(process.pid)) and time.monotonic() < deadline:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.poll()
            await asyncio.sleep(0.01)
        return left

    @staticmethod
    def _release(process: subprocess.Popen[bytes]) -> None:
        if process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.close()

    # ------------------------------------------------------------------------------------------------- watching

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def ended(self) -> str:
        status = None if self._process is None else self._process.poll()
        if status is None:
            return ""
        number = -status if status < 0 else status - 128
        if number in {int(known) for known in signal.Signals}:
            return f"signal {signal.Signals(number).name}"
        return f"exit status {status}"

    def process_ids(self) -> list[int]:
        """The server's process and everything below it; empty if it is not running."""
        return descendants(self._process.pid)[1:] if self._process is not None and self.alive else []

    def last_lines(self, n: int = 20) -> str:
        return tail_of(self.log, n, self._log_start)


def tail_of(path: Path, n: int, start: int = 0) -> str:
    """The last `n` lines of a file, of those behind its byte `start`; empty if there is no such file."""
    if not path.is_file():
        return ""
    with path.open("rb") as log:
        end = log.seek(0, os.SEEK_END)
        log.seek(max(start, end - TAIL_BYTES))
        text = log.read().decode("utf-8", errors="replace")
    return "\n".join(text.rstrip().splitlines()[-n:])


__all__ = ["Process", "ServerFailed", "ServerProcess", "tail_of"]
