"""hone's side of the sandboxes on this machine.

    LocalSandboxes --ProcessTree--> supervisor --> warm parent (warm.py) --fork--> attendant --> program
    LocalSandbox.run <==========socket: request, reply===========================> attendant

One warm parent serves all sandboxes of a host, and is started with the first. If it dies, the runs of that moment are
lost (`SandboxLost`), and the next run starts another one. Reward processes import this file: standard library only.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from hone.processes.child import tail_of
from hone.processes.frames import HEADER, BrokenFrame, Frame, FrameReader, Kind, encode
from hone.processes.leftovers import remove_folder
from hone.processes.restarts import Restarts
from hone.processes.supervisor import FOLDER
from hone.processes.tree import ProcessTree
from hone.sandboxes.attendant import ran_of, request_of
from hone.sandboxes.base import PYTHON, Limits, Ran, SandboxLost, SandboxRefused, check_request, seat, seats
from hone.sandboxes.kernel.cgroups import Group

Backend = Literal["landlock", "bubblewrap"]
START_S = 60.0  # starting an interpreter on a busy machine
GRACE_S = 45.0  # beyond a program's own deadline: to prepare it, to kill its tree and to send its output
RESTARTS, WINDOW_S = 5, 60.0
MOST_BYTES = 1 << 28  # of a reply
TAKEN_S = 15.0  # a parent that has not forked an attendant by then is stopped
PROBE, PROBE_S = "probe-", 10.0  # how the sandboxes of hone's own programs are called, and their deadline
REMOVE_S = 10.0
CANNOT_RUN = 126  # the status of a program that cannot be run, as shells have it
PACKAGE = str(Path(__file__).parents[2])
BOOT = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
runpy.run_module("hone.sandboxes.warm", run_name="__main__", alter_sys=True)
"""


class NotRun(SandboxLost):
    """An attendant could not run a program. Where it can run another one, the first is to blame."""


class LocalSandboxes:
    """Sandboxes of one back end on this machine, for one event loop."""

    def __init__(self, backend: Backend, limits: Limits, python: str = "", landlock: int = 0) -> None:
        """`python`: the interpreter that runs programs; default: hone's own. `landlock`: its newest version to use."""
        self.backend = backend
        self.limits = limits
        self._python = python or sys.executable
        self._newest = [str(landlock)] if landlock else []
        self._seats = asyncio.Semaphore(seats(limits))
        self._starting = asyncio.Lock()
        self._restarts = Restarts(RESTARTS, WINDOW_S)
        self._numbers = itertools.count()
        self._tree: ProcessTree | None = None
        self._control: socket.socket | None = None
        self._folder = ""
        self._stops = ""
        self._groups = Group(0, ())
        self._mounts = False  # whether working folders are file systems of the warm parent's

    async def start(self) -> str:
        async with self._starting:
            if self._tree is None or self._control is None or not self._tree.alive:
                await self._start()
        return self._stops

    def open(self) -> LocalSandbox:
        return LocalSandbox(self, next(self._numbers))

    async def close(self) -> None:
        self._hang_up()
        if self._tree is not None:
            await asyncio.to_thread(_end, self._tree)
        if self._groups.folders:
            await asyncio.to_thread(self._groups.remove)  # a killed parent leaves its groups
        if self._folder:
            await asyncio.to_thread(remove_folder, self._folder)
        self._tree = None
        self._folder = ""

    @property
    def process_ids(self) -> list[int]:
        """The warm parent, then its attendants and programs."""
        return [] if self._tree is None else self._tree.process_ids()

    async def _start(self) -> None:
        if self._tree is not None:
            if not self._restarts.take():
                raise SandboxLost(f"the parent of the sandboxes died more often than {self._restarts}")
            await asyncio.to_thread(_end, self._tree)
            self._hang_up()
        if not self._folder:
            self._folder = tempfile.mkdtemp(prefix="hone-sandboxes-")
            os.chmod(self._folder, 0o711)  # root's sandboxes have users of their own, which must reach their folders
        self._control, theirs = socket.socketpair()
        log = Path(self._folder, "log")
        env = shutil.which("env") or "/usr/bin/env"
        path = f"PATH={os.environ.get('PATH', os.defpath)}"  # bubblewrap is found where this process finds it
        clean = [env, "-i", path, "PYTHONHASHSEED=0", "LANG=C.UTF-8", self._python, "-P", "-s", "-c", BOOT]
        try:
            with log.open("wb") as output:
                command = [*clean, PACKAGE, str(theirs.fileno()), self.backend, *self._newest]
                self._tree = ProcessTree(command, {FOLDER: self._folder}, output, theirs.fileno())
        except OSError as error:
            raise SandboxLost(f"the parent of the sandboxes cannot be started: {error}") from error
        finally:
            theirs.close()
        hello = await self._hello(log)
        if refused := hello.get("refused"):
            raise SandboxRefused(f"{self.backend}: {refused}")
        if not {"stops", "mounts", "groups"} <= hello.keys():
            raise SandboxLost(f"the parent of the sandboxes broke the protocol: it said {hello!s:.200}")
        self._stops = str(hello["stops"])
        self._mounts = bool(hello["mounts"])
        self._groups = Group(0, tuple(map(Path, hello["groups"])))
        self._restarts.worked()

    async def _hello(self, log: Path) -> dict[str, Any]:
        assert self._control is not None
        loop = asyncio.get_running_loop()
        self._control.setblocking(False)
        reader = FrameReader(MOST_BYTES)
        try:
            async with asyncio.timeout(START_S):
                while data := await loop.sock_recv(self._control, 1 << 16):
                    for frame in reader.feed(data):
                        return frame.body
        except (TimeoutError, OSError, BrokenFrame) as error:
            raise SandboxLost(f"the parent of the sandboxes did not start: {error!r} {tail_of(log, 5)}") from error
        raise SandboxLost(f"the parent of the sandboxes ended while it started: {tail_of(log, 5)}")

    async def run(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Let the warm parent fork an attendant for `request`; returns its reply. Raises SandboxLost."""
        async with seat(self._seats):
            channel = await self._channel()
            return await self._ask(channel, {**request, "folder": f"{self._folder}/{request['folder']}"}, timeout_s)

    async def works(self) -> bool:
        """Return whether a program of hone's own runs in a new sandbox now."""
        probe = LocalSandbox(self, next(self._numbers), PROBE)
        try:
            ran = await probe.run([PYTHON, "probe.py"], files={"probe.py": b"print(6 * 7)"}, timeout_s=PROBE_S)
            return ran.stdout.strip() == b"42"
        except SandboxLost:
            return False
        finally:
            await probe.close()

    async def _channel(self) -> socket.socket:
        """A socket to a new attendant. A parent that has just died is replaced: nothing has run yet."""
        for _ in range(2):
            await self.start()
            assert self._control is not None
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            try:
                socket.send_fds(self._control, [b"."], [theirs.fileno()])
                theirs.close()
                async with asyncio.timeout(TAKEN_S):
                    if await asyncio.get_running_loop().sock_recv(ours, 1):
                        return ours
                raise ConnectionError("it ended")
            except (OSError, TimeoutError) as error:
                ours.close()
                await self._give_up(error)
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
        raise SandboxLost("the parent of the sandboxes died before it took a program, or was stopped")

    async def _give_up(self, error: Exception) -> None:
        """End a parent that has died, or that takes nothing, so that the next one is started."""
        self._hang_up()
        if isinstance(error, TimeoutError) and self._tree is not None:
            await asyncio.to_thread(_end, self._tree)

    def _hang_up(self) -> None:
        if self._control is not None:
            self._control.close()
        self._control = None

    async def _ask(self, channel: socket.socket, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        reader, writer = await asyncio.open_connection(sock=channel)
        try:
            async with asyncio.timeout(timeout_s + GRACE_S):
                writer.write(encode(Kind.REQUEST, 0, request))
                await writer.drain()
                frame = await _frame(reader)
        except TimeoutError as error:
            raise SandboxLost(f"a sandbox did not answer within {timeout_s + GRACE_S:g} s") from error
        except (OSError, EOFError, BrokenFrame) as error:
            raise SandboxLost(f"a sandbox was killed while its program ran ({error})") from error
        finally:
            writer.close()
        if lost := frame.body.get("lost"):
            raise SandboxLost(str(lost)) if frame.body.get("gone") else NotRun(str(lost))
        return frame.body

    async def removed(self, name: str) -> None:
        """Remove the working folder of a sandbox."""
        if self._mounts and self._control is not None and self._tree is not None and self._tree.alive:
            with suppress(SandboxLost):  # the parent is gone, and its mounts with it
                await self._ask(await self._channel(), {"remove": f"{self._folder}/{name}"}, REMOVE_S)
        if self._folder:
            await asyncio.to_thread(remove_folder, f"{self._folder}/{name}")


class LocalSandbox:
    """One working folder (`hone.sandboxes.base.Sandbox`)."""

    def __init__(self, host: LocalSandboxes, number: int, prefix: str = "") -> None:
        self._host = host
        self._name = f"{prefix}{number:08d}"
        self._one = asyncio.Lock()
        self._used = False
        self._fresh = True  # no program has left anything in it that may be expected

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
        own = {"backend": self._host.backend, "folder": self._name, "limits": asdict(self._host.limits)}
        request = {**own, **request_of(argv, stdin, files, wanted, timeout_s)}
        async with self._one:
            self._used = True
            try:
                reply = await self._host.run({**request, "fresh": self._fresh}, timeout_s)
            except NotRun as error:
                if self._name.startswith(PROBE) or not await self._host.works():
                    raise
                return Ran(CANNOT_RUN, b"", f"the program cannot be run in its folder: {error}\n".encode(), 0.0)
            except SandboxLost:
                self._fresh = True  # the caller knows that what was there may be gone
                raise
            self._fresh = False
        try:
            return ran_of(reply)
        except (KeyError, TypeError, ValueError) as error:
            raise SandboxLost(f"a sandbox gave a malformed reply ({error!r}): {reply!s:.200}") from error

    async def close(self) -> None:
        if self._used:
            await self._host.removed(self._name)


async def _frame(reader: asyncio.StreamReader) -> Frame:
    """Read one frame. Raises EOFError, BrokenFrame or OSError."""
    header = await reader.readexactly(HEADER.size)
    length = HEADER.unpack(header)[0]
    if length > MOST_BYTES:
        raise BrokenFrame(f"a reply of {length} bytes")
    (frame,) = FrameReader(MOST_BYTES).feed(header + await reader.readexactly(length))
    return frame


def _end(tree: ProcessTree) -> None:
    for _ in tree.ending(0):
        time.sleep(0.005)


__all__ = ["LocalSandbox", "LocalSandboxes"]
