"""The warm parent: an interpreter that has started already and forks an attendant for each run.

    python -P -s -c BOOT FOLDER-OF-HONE DESCRIPTOR BACKEND [LANDLOCK]     (by `local`, with an empty environment)

hone sends one descriptor for each run: a socket on which the attendant gets its request. The warm parent itself never
reads a request, so nothing of one run is in the memory of the next. It is a subreaper: what a killed attendant leaves
behind becomes its child, and it kills that.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from hone.processes.frames import Kind, encode
from hone.processes.supervisor import FIRST_QUIET_S, PR_SET_CHILD_SUBREAPER, descendants, processes
from hone.sandboxes.attendant import Job, attend
from hone.sandboxes.confinement import stops, why_not
from hone.sandboxes.kernel.cgroups import Groups, NoGroups, own_groups
from hone.sandboxes.kernel.landlock import use_at_most
from hone.sandboxes.kernel.mounts import own_mounts

TAKEN = b"+"  # an attendant's first byte
COUNT_S = 1.0  # between two counts of this user's processes
STRANGERS_S = 2.0  # what ending the processes of a killed attendant may take; meanwhile no other attendant is started


def main() -> None:
    """Serve until hone closes the socket; in a confined child, run its job."""
    control = socket.socket(fileno=int(sys.argv[2]))
    control.set_inheritable(False)
    if len(sys.argv) > 4:
        use_at_most(int(sys.argv[4]))
    reason = why_not(sys.argv[3])
    if reason:
        control.sendall(encode(Kind.HELLO, 0, {"refused": reason}))
        return
    groups, limited = _groups()
    counted = own_mounts()
    disk = f"; disk by counting ({counted})" if counted else ""
    folders = [str(folder) for folder in groups.own.folders] if groups else []
    hello = {"stops": f"{stops(sys.argv[3])}; {limited}{disk}", "mounts": not counted, "groups": folders}
    control.sendall(encode(Kind.HELLO, 0, hello))
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    run(_Warm(control, groups, mounts=not counted).serve())


def _groups() -> tuple[Groups | None, str]:
    """The cgroups of the programs, where there may be some, and what limits memory and processes."""
    try:
        groups = own_groups()
    except NoGroups as error:
        return None, f"memory and processes by rlimits and counting ({error})"
    return groups, f"memory and processes by {groups}"


class _Warm:
    """The loop of the warm parent."""

    def __init__(self, control: socket.socket, groups: Groups | None, *, mounts: bool) -> None:
        self._control = control
        self._groups = groups
        self._mounts = mounts
        self._attendants: set[int] = set()
        self._counted_at, self._others = -COUNT_S, 0
        self._wake, signalled = os.pipe()
        os.set_blocking(signalled, False)
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._signalled = signalled

    def serve(self) -> Job:
        """Fork an attendant for each socket that hone sends. Returns in a confined child only."""
        gc.collect()
        gc.freeze()  # the pages of these objects stay shared
        watched: list[socket.socket | int] = [self._control, self._wake]
        while True:
            readable, _, _ = select.select(watched, [], [])  # hone ends this process by closing
            if self._wake in readable:
                self._reap()
            if self._control in readable:
                data, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
                if not data:
                    if self._groups:
                        self._groups.own.remove()
                    os._exit(0)
                others = self._count()
                if job := self._fork(socket.socket(fileno=descriptors[0]), others):
                    return job

    def _fork(self, channel: socket.socket, others: int) -> Job | None:
        pid = os.fork()
        if pid:
            self._attendants.add(pid)
            channel.close()
            return None
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._control.close()
        os.close(self._wake)
        os.close(self._signalled)
        channel.sendall(TAKEN)  # hone knows that the warm parent is not stopped
        return attend(channel, others, mounts=self._mounts, groups=self._groups)

    def _count(self) -> int:
        """Processes and threads of this user: the kernel's limit counts all of them. Root's sandboxes have users."""
        if os.geteuid() == 0:
            return 0
        if time.monotonic() - self._counted_at >= COUNT_S:
            among = {os.getpid(), *descendants(os.getpid())} if self._mounts else None  # a user namespace of its own
            self._counted_at, self._others = time.monotonic(), count_threads(os.geteuid(), among)
        return self._others

    def _reap(self) -> None:
        """Note which attendants have ended; one that was killed has left its program behind."""
        with suppress(BlockingIOError):
            os.read(self._wake, 4096)
        with suppress(ChildProcessError):
            while ended := os.waitpid(-1, os.WNOHANG):
                pid, status = ended
                if pid == 0:
                    return
                self._attendants.discard(pid)
                if status:
                    self._kill_strangers()
                    if self._groups:
                        self._groups.of(str(pid)).remove()

    def _kill_strangers(self) -> None:
        """Kill every process below this one that is not below an attendant, and reap none meanwhile (`kill_below`)."""
        now = seen = time.monotonic()
        deadline = now + STRANGERS_S
        while now < min(deadline, seen + FIRST_QUIET_S):
            strangers = {pid for pid, parent, _ in processes() if parent == os.getpid()} - self._attendants
            now = time.monotonic()
            seen = now if strangers else seen
            for pid in strangers:
                for one in (pid, *descendants(pid)):
                    with suppress(ProcessLookupError):
                        os.kill(one, signal.SIGKILL)


def count_threads(user: int, among: Collection[int] | None = None) -> int:
    """Threads of a user's processes: of all, or of those `among` some."""
    count = 0
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            if entry.stat().st_uid == user and (among is None or int(entry.name) in among):
                fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
                count += int(fields[17])
    return count


def run(job: Job) -> None:
    """Run a Python file as a fresh interpreter would; its exit status is this process's."""
    os.environ.clear()
    os.environ.update(job.environment)
    sys.argv = list(job.argv)
    sys.path = [os.getcwd(), *sys.path[1:]]  # the first entry is hone's
    for name in [name for name in sys.modules if name.partition(".")[0] == "hone"]:
        del sys.modules[name]
    gc.unfreeze()
    status = 0
    try:
        runpy.run_path(job.argv[0], run_name="__main__")
    except SystemExit as ended:
        status = _status(ended.code)
    except BaseException as error:  # noqa: BLE001  the program's own, which its reader wants to see
        _show(error, job.argv[0])
        status = 1
    _leave(status)


def _status(code: object) -> int:
    """The exit status that `sys.exit(code)` means."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


def _show(error: BaseException, path: str) -> None:
    """Print a traceback that begins in the program."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != path:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def _leave(status: int) -> NoReturn:
    """End as an interpreter does, but without freeing every object, which takes longer than most programs."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001  a closed or full output
        status = status or 120
    os._exit(status)


if __name__ == "__main__":
    main()
