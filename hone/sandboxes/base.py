"""The contract of a sandbox: a program runs in a working folder of its own and gives a `Ran`.

Who caused it? What the program did (a time-out, too much memory, an exit status) is a `Ran`. What the machine did (the
sandbox could not be prepared, or its process was killed) raises `SandboxLost`, which is never a result.

Reward processes import this file, so it imports the standard library only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal, Protocol

from hone import machine

Limit = Literal["", "time", "cpu", "memory", "output", "disk", "processes"]
SEAT_S = 600.0  # for a free seat
PYTHON = "python"  # as the first argument: the interpreter of the sandbox


class SandboxLost(RuntimeError):
    """The sandbox failed, not the program in it: there is no result."""


class SandboxRefused(RuntimeError):
    """No sandbox of this kind works on this machine; the message says why."""


@dataclass(frozen=True)
class Limits:
    """Limits of one program and everything that it starts. A program that uses more is killed."""

    memory_mb: int = 512  # address space of each process, and memory of all of them together
    processes: int = 32  # processes and threads
    output_kb: int = 1024  # of standard output, and of standard error
    disk_mb: int = 64  # the working folder
    cpu_s: int = 60  # processor time of each process
    network: bool = False
    at_once: int = 0  # programs that run at the same time; 0: one for each processor


DEFAULT = Limits()


@dataclass(frozen=True, slots=True)
class Ran:
    """Result of a program: output, exit status, and the limit that ended it."""

    status: int  # exit status; negative: the signal that ended it
    stdout: bytes
    stderr: bytes
    seconds: float
    limit: Limit = ""  # the limit that ended it
    files: Mapping[str, bytes] = field(default_factory=dict)  # the wanted files that exist afterwards

    @property
    def ok(self) -> bool:
        return self.status == 0 and not self.limit


class Sandbox(Protocol):
    """A working folder in which programs run one after another."""

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        files: Mapping[str, bytes] = {},
        wanted: Sequence[str] = (),
        timeout_s: float,
    ) -> Ran:
        """Write `files` (path in the working folder -> content), run a program, and read the files `wanted`.

        The first argument `python` is the sandbox's interpreter. All processes that the program started have ended
        when this returns. Raises SandboxLost.
        """

    async def close(self) -> None:
        """Remove the working folder."""


class SandboxHost(Protocol):
    """Opens sandboxes. It belongs to one event loop."""

    async def start(self) -> str:
        """Make sure that sandboxes work; returns what they stop. Raises SandboxRefused or SandboxLost."""

    def open(self) -> Sandbox:
        """A new, empty working folder. Close it."""

    async def close(self) -> None:
        """End everything that belongs to the host. Call it after the last sandbox is closed."""


def parts_of(path: str) -> tuple[str, ...]:
    """The folders and the name of a path in a working folder. Raises ValueError if it leads elsewhere."""
    found = PurePosixPath(path).parts
    if not found or path.startswith("/") or ".." in found or "\0" in path:
        raise ValueError(f"{path!r} is not a path inside the working folder; write it like data/input.txt")
    return found


def check_request(argv: Sequence[str], paths: Iterable[str]) -> None:
    """Raise ValueError for a command line or paths that no sandbox runs: the caller's mistake, not the program's."""
    for path in paths:
        parts_of(path)
    if not argv or any("\0" in one for one in argv):
        raise ValueError(f"a command line should have words without null bytes, found {list(argv)!r:.80}")


def seats(limits: Limits) -> int:
    """Return the number of programs that may run at the same time."""
    return limits.at_once or machine.cores()


@asynccontextmanager
async def seat(free: asyncio.Semaphore) -> AsyncIterator[None]:
    """Hold one of the seats of a host. Raises SandboxLost if none is free for `SEAT_S` seconds."""
    try:
        async with asyncio.timeout(SEAT_S):
            await free.acquire()
    except TimeoutError as error:
        raise SandboxLost(f"no sandbox was free for {SEAT_S:g} s; raise at_once, or shorten the programs") from error
    try:
        yield
    finally:
        free.release()


__all__ = [
    "DEFAULT",
    "PYTHON",
    "Limit",
    "Limits",
    "Ran",
    "Sandbox",
    "SandboxHost",
    "SandboxLost",
    "SandboxRefused",
    "check_request",
    "parts_of",
    "seat",
    "seats",
]
