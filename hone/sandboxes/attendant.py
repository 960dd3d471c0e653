"""Runs one program in its sandbox and watches it: forked from the warm parent for each run.

    hone <--socket: request, reply--> attendant --fork--> program, confined --> its children
         (closes it to stop the program)      \\--- reads its output, looks at memory, disk and clock, kills the tree

The attendant is a subreaper: every process of the program stays below it, also one with a session of its own. It
replies when none of them is left. In the child, `attend` returns a `Job` for the warm interpreter, or does not return.
"""

from __future__ import annotations

import base64
import ctypes
import fcntl
import itertools
import json
import os
import selectors
import signal
import socket
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hone.processes.frames import FrameReader, Kind, encode
from hone.processes.leftovers import empty_folder, remove_folder
from hone.processes.supervisor import KILL_S, PR_SET_CHILD_SUBREAPER, descendants, kill_below
from hone.sandboxes import bubblewrap
from hone.sandboxes.base import PYTHON, Limits, Ran, parts_of
from hone.sandboxes.confinement import Confinement, enter, free_user, prepare, readable
from hone.sandboxes.kernel.cgroups import SPARE, Group, Groups
from hone.sandboxes.kernel.mounts import mount_folder, unmount
from hone.sandboxes.kernel.socket_memory import socket_bytes

GLANCE_S, DISK_GLANCES = 0.05, 4  # between two looks at the program; every so many of them at its folder
PREPARE_S = 30.0
READ_BYTES = 1 << 16
MOST_FILES, DEEPEST = 10_000, 100  # files in the working folder, and folders within each other
UNCOUNTABLE = 1 << 62  # more bytes than any limit
F_ADD_SEALS, ALL_SEALS = 1033, 15


@dataclass(frozen=True, slots=True)
class Job:
    """A Python file that the warm interpreter runs, in the child that the attendant confined."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]


def request_of(
    argv: Sequence[str], stdin: bytes, files: Mapping[str, bytes], wanted: Sequence[str], timeout_s: float
) -> dict[str, Any]:
    """The part of a request that says what to run, as JSON; the rest: `backend`, `folder` and `limits`."""
    return {
        "argv": list(argv),
        "stdin": _text(stdin),
        "files": {path: _text(content) for path, content in files.items()},
        "wanted": list(wanted),
        "timeout_s": timeout_s,
    }


def ran_of(reply: Mapping[str, Any]) -> Ran:
    """The reply to a request. Raises KeyError, TypeError or ValueError for one that no attendant wrote."""
    return Ran(
        status=int(reply["status"]),
        stdout=base64.b64decode(reply["stdout"]),
        stderr=base64.b64decode(reply["stderr"]),
        seconds=float(reply["seconds"]),
        limit=reply["limit"],
        files={path: base64.b64decode(content) for path, content in dict(reply["files"]).items()},
    )


def attend(channel: socket.socket, others: int, *, mounts: bool = False, groups: Groups | None = None) -> Job:
    """Serve one request. Returns in the confined child only.

    `others`: processes that this user has already. `mounts`: working folders are file systems of a fixed size.
    `groups`: the cgroups of programs, where there are some.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    request = _request(channel)
    try:
        if "remove" in request:
            _forget(str(request["remove"]))
            _send(channel, {"removed": True})
        run = _Run(request, others, mounts, groups.of(str(os.getpid())) if groups else None)
        if job := run.start():
            return job
        reply = run.watch(channel)
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        _end_all()
        if groups:
            groups.of(str(os.getpid())).remove()
        reply = {"lost": f"{type(error).__name__}: {error}", "gone": isinstance(error, _FolderGone)}
    return _send(channel, reply)


def _send(channel: socket.socket, reply: Mapping[str, Any]) -> NoReturn:
    """Send the reply and end the attendant."""
    with suppress(OSError):  # hone no longer waits
        channel.sendall(encode(Kind.REPLY, 0, reply))
    os._exit(0)


class _FolderGone(RuntimeError):
    """The working folder is gone, with all that earlier programs left, because the parent of the sandboxes ended."""


def _forget(folder: str) -> None:
    """Remove a working folder that is a file system of its own."""
    if os.path.ismount(folder):
        unmount(folder)
    remove_folder(folder)


def _request(channel: socket.socket) -> dict[str, Any]:
    reader = FrameReader()
    while data := channel.recv(1 << 20):
        for frame in reader.feed(data):
            return frame.body
    os._exit(0)  # hone gave up


class _Run:
    """One program: its pipes, its processes and what it used."""

    def __init__(self, request: Mapping[str, Any], others: int, mounts: bool, group: Group | None) -> None:
        self._backend, self._folder = str(request["backend"]), str(request["folder"])
        self._argv = tuple(request["argv"])
        self._limits = Limits(**request["limits"])
        self._timeout_s = float(request["timeout_s"])
        self._wanted: Sequence[str] = request["wanted"]
        self._environment = _environment(self._folder)
        self._mounts, self._group = mounts, group
        self._user = self._own_folder(fresh=bool(request.get("fresh", True)))
        for path, content in request["files"].items():
            write_inside(self._folder, path, base64.b64decode(content), self._user)
        self._stdin = _sealed(base64.b64decode(request["stdin"]))
        self._plan = prepare(self._backend, self._folder, self._limits, self._user, others, fixed=mounts)
        self._output: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self._limit = ""

    def _own_folder(self, *, fresh: bool) -> int:
        """Create the working folder at the first run; returns the user whose it is, or -1 for an ordinary user's."""
        root = os.geteuid() == 0
        with suppress(FileExistsError):
            Path(self._folder).mkdir(mode=0o700)
            if root:
                user = free_user(os.getpid())
                os.chown(self._folder, user, user)
        found = os.stat(self._folder)
        if self._mounts and not os.path.ismount(self._folder):
            if not fresh:
                raise _FolderGone("the working folder is gone: the parent of the sandboxes was started again")
            mount_folder(self._folder, self._limits.disk_mb << 20, MOST_FILES, (found.st_uid, found.st_gid))
        os.chmod(self._folder, 0o700)  # the program before may have closed it
        return found.st_uid if root else -1

    def start(self) -> Job | None:
        """Fork the program. Returns a job in the child for the warm interpreter, None in the attendant."""
        if self._group:
            self._group.make()
            files = self._limits.disk_mb << 20 if self._mounts else 0  # of a tmpfs, which is memory
            helpers = 2 if self._backend == "bubblewrap" else 0
            self._group.limit((self._limits.memory_mb << 20) + files + SPARE, self._limits.processes + helpers)
        pipes = {name: os.pipe() for name in ("stdout", "stderr", "failure", "report")}
        self._began = time.monotonic()
        self._child = os.fork()
        if self._child == 0:
            return self._become_program({name: write for name, (_, write) in pipes.items()})
        for _, write in pipes.values():
            os.close(write)
        os.close(self._stdin)
        if self._plan.rules >= 0:
            os.close(self._plan.rules)
        self._pipes = {name: read for name, (read, _) in pipes.items()}
        if failure := _read_all(self._pipes["failure"], time.monotonic() + PREPARE_S):
            raise RuntimeError(failure.decode("utf-8", "replace"))
        self._began = time.monotonic()
        return None

    def _become_program(self, pipes: Mapping[str, int]) -> Job | None:
        """In the child: give up every right, then run the program, or say why that was not possible."""
        try:
            os.setsid()
            if self._group:
                self._group.enter()
            for number, descriptor in enumerate((self._stdin, pipes["stdout"], pipes["stderr"])):
                os.dup2(descriptor, number)
            kept = [pipes["failure"], *([self._plan.rules] if self._plan.rules >= 0 else [pipes["report"]])]
            _close_all_but(kept)
            os.chdir(self._folder)
            enter(self._plan)
            argv = self._argv
            if self._backend == "landlock" and argv[0] == PYTHON and len(argv) > 1 and argv[1].endswith(".py"):
                os.close(pipes["failure"])
                return Job(argv[1:], self._environment)
        except BaseException as error:  # noqa: BLE001  whatever it was, the program must not begin
            os.write(pipes["failure"], f"the sandbox cannot be prepared: {error}".encode())
            os._exit(1)
        return self._execute(pipes)

    def _execute(self, pipes: Mapping[str, int]) -> NoReturn:
        argv = [os.path.realpath(sys.executable), *self._argv[1:]] if self._argv[0] == PYTHON else list(self._argv)
        environment = self._environment
        if self._backend == "bubblewrap":
            inside = (_filter_file(self._plan), pipes["report"])
            os.set_inheritable(inside[1], True)
            argv = [
                *bubblewrap.command(
                    self._folder, readable(self._limits), environment, inside, network=self._limits.network
                ),
                *argv,
            ]
        try:
            os.execvpe(argv[0], argv, environment)
        except (OSError, ValueError) as error:
            os.write(2, f"{argv[0]}: {error}\n".encode())
        os._exit(127)

    def watch(self, channel: socket.socket) -> dict[str, Any]:
        """Wait for the program's end and end its tree; returns the reply."""
        ended = _descriptor_of(self._child)
        with selectors.DefaultSelector() as selector:
            for name in self._output:
                os.set_blocking(self._pipes[name], False)
                selector.register(self._pipes[name], selectors.EVENT_READ, name)
            if ended >= 0:
                selector.register(ended, selectors.EVENT_READ, "ended")
            selector.register(channel, selectors.EVENT_READ, "stop")
            glances, glance = 0, time.monotonic() + GLANCE_S
            while not self._limit:
                left = min(glance, self._began + self._timeout_s) - time.monotonic()
                names = {str(key.data) for key, _ in selector.select(max(0.0, left))}
                for name in names & self._output.keys():
                    if not self._read(name):
                        selector.unregister(self._pipes[name])
                if "ended" in names or "stop" in names:
                    break
                if time.monotonic() >= self._began + self._timeout_s:
                    self._limit = "time"
                elif time.monotonic() >= glance:
                    glances, glance = glances + 1, time.monotonic() + GLANCE_S
                    self._limit = self._limit or self._look(disk=glances % DISK_GLANCES == 0)
                    if ended < 0 and _has_ended(self._child):
                        break
        seconds = time.monotonic() - self._began
        status = self._end()
        for name in self._output:
            while self._read(name):
                pass
        return self._reply(status, seconds)

    def _read(self, name: str) -> bool:
        """Read some output; False at its end, when there is none now, or when it is too much."""
        try:
            data = os.read(self._pipes[name], READ_BYTES)
        except BlockingIOError:
            return False
        kept = self._output[name]
        room = (self._limits.output_kb << 10) - len(kept)
        kept += data[:room]
        if len(data) > room:
            self._limit = self._limit or "output"
        return bool(data) and len(data) <= room

    def _look(self, *, disk: bool) -> str:
        """The limit that the program exceeds now, if any."""
        below = descendants(os.getpid())
        if len(below) > self._limits.processes + 2:  # bubblewrap has two of its own
            return "processes"
        apart = self._backend == "bubblewrap" and not self._limits.network
        sockets = 0 if apart and self._group else socket_bytes(self._user, below, apart=apart)
        if self._exhausted() or sum(_memory(pid) for pid in below) + sockets > self._limits.memory_mb << 20:
            return "memory"
        if (
            disk
            and self._used_bytes() + sum(_unlinked(pid, self._folder) for pid in below) > self._limits.disk_mb << 20
        ):
            return "disk"
        return ""

    def _exhausted(self) -> bool:
        """Return whether the kernel has ended a process because the program used too much memory."""
        return self._group is not None and self._group.ran_out_of_memory()

    def _used_bytes(self) -> int:
        """Bytes in the working folder; UNCOUNTABLE with too many files."""
        if not self._mounts:
            return _used(self._folder)
        found = os.statvfs(self._folder)
        return (found.f_blocks - found.f_bfree) * found.f_frsize if found.f_ffree else UNCOUNTABLE

    def _end(self) -> int:
        """Kill what is left of the program; returns its status as `subprocess` gives it."""
        status = _end_all(self._child)
        if not self._limit and status == -signal.SIGXCPU:
            self._limit = "cpu"
        if not self._limit and self._exhausted():
            self._limit = "memory"
        if self._group:
            self._group.remove()
        if not self._limit and self._used_bytes() > self._limits.disk_mb << 20:
            self._limit = "disk"
        return status

    def _reply(self, status: int, seconds: float) -> dict[str, Any]:
        if self._backend == "bubblewrap" and not self._limit:
            report = _read_all(self._pipes["report"], time.monotonic() + PREPARE_S)
            codes = [json.loads(line).get("exit-code") for line in report.splitlines()]
            said = self._output["stderr"].decode("utf-8", "replace").strip()
            if said.startswith("bwrap: execvp "):
                status = 127
            elif not any(code is not None for code in codes):
                raise RuntimeError(f"bubblewrap could not start the program: {said[-400:] or f'status {status}'}")
            status = 128 - status if 128 < status < 128 + signal.NSIG else status  # a signal, as bubblewrap says it
        files = {}
        for path in self._wanted:
            content = read_inside(self._folder, path, self._limits.disk_mb << 20)
            if content is not None:
                files[path] = _text(content)
        return {
            "status": status,
            **{name: _text(data) for name, data in self._output.items()},
            "seconds": seconds,
            "limit": self._limit,
            "files": files,
        }


# ------------------------------------------------------------------------------------------------------------- files


def write_inside(folder: str, path: str, content: bytes, user: int) -> None:
    """Write a file in the working folder, in place of whatever a program left under its name and those above it."""
    *above, name = parts_of(path)
    parent = _descend(folder, above, user)
    try:
        _clear(name, parent)
        created = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o700, dir_fd=parent)
        with open(created, "wb") as file:
            file.write(content)
            if user >= 0:
                os.fchown(created, user, user)
    finally:
        os.close(parent)


def read_inside(folder: str, path: str, most: int) -> bytes | None:
    """The content of a plain file in the working folder, at most `most` bytes; None if there is no such file."""
    *above, name = parts_of(path)
    try:
        parent = _descend(folder, above, None)
    except OSError:
        return None
    try:
        found = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
    except OSError:
        return None
    finally:
        os.close(parent)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        return None
    with open(found, "rb") as file:
        return file.read(most)


def _descend(folder: str, above: Sequence[str], create_for: int | None) -> int:
    """Open a folder below `folder`, one step at a time and never through a link; `create_for`: who gets a new one."""
    here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    for name in above:
        try:
            if create_for is not None:
                _create(name, here, create_for)
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
        finally:
            os.close(here)
        here = below
    return here


def _clear(name: str, above: int) -> None:
    """Remove what has this name in an open folder: a file, a link, or a folder with all that is in it."""
    try:
        os.unlink(name, dir_fd=above)
    except FileNotFoundError:
        return
    except IsADirectoryError:
        os.chmod(name, 0o700, dir_fd=above)
        found = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
        try:
            empty_folder(found)
        finally:
            os.close(found)
        os.rmdir(name, dir_fd=above)


def _create(name: str, above: int, user: int) -> None:
    """Create a folder below the open folder `above`, in place of anything else of that name."""
    with suppress(FileNotFoundError):
        if not stat.S_ISDIR(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=above)
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=above)
        if user >= 0:
            os.chown(name, user, user, dir_fd=above, follow_symlinks=False)


def _sealed(content: bytes) -> int:
    """A descriptor of a file in memory that holds `content` and can no longer change."""
    number = os.memfd_create("stdin", os.MFD_ALLOW_SEALING)
    with open(number, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(number, 0, os.SEEK_SET)
    fcntl.fcntl(number, F_ADD_SEALS, ALL_SEALS)
    return number


def _filter_file(plan: Confinement) -> int:
    number = os.memfd_create("filter", 0)
    os.write(number, plan.filter)
    os.lseek(number, 0, os.SEEK_SET)
    return number


# --------------------------------------------------------------------------------------------------------- processes


def _end_all(child: int = 0) -> int:
    """Kill every process below this one; returns the status of `child`. Raises RuntimeError."""
    statuses: dict[int, int] = {}

    def reap() -> bool:
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                statuses.update([ended])
        except ChildProcessError:
            return True  # an orphan would be a child of this process
        return False

    if not kill_below(reap):
        raise RuntimeError(f"processes of a sandbox did not end within {KILL_S:g} s of SIGKILL")
    return os.waitstatus_to_exitcode(statuses.get(child, 0))


def _descriptor_of(pid: int) -> int:
    """A descriptor that becomes readable when a process ends; -1 on kernels without one, such as gVisor's."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _memory(pid: int) -> int:
    """Bytes that a process holds; memory that several share is divided between them, where the kernel counts that."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Pss:", "SwapPss:")))
    if not Path("/proc/self/smaps_rollup").exists():
        with suppress(OSError):  # it has ended
            return int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGESIZE")
    return 0


def _used(folder: str) -> int:
    """Bytes on disk below a folder; UNCOUNTABLE where nobody can count them.

    That is, with more than MOST_FILES files, folders nested deeper than DEEPEST, or folders closed to their owner.
    """
    used = files = 0
    open_folders: list[int] = []
    try:
        open_folders.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
        inside = [_names_in(open_folders[0])]  # what is left to look at, for each open folder
        while open_folders:
            if not inside[-1]:
                inside.pop()
                os.close(open_folders.pop())
                continue
            name, here = inside[-1].pop(), open_folders[-1]
            files += 1
            if files > MOST_FILES or len(open_folders) > DEEPEST:
                return UNCOUNTABLE
            with suppress(FileNotFoundError):  # the program removed it meanwhile
                found = os.stat(name, dir_fd=here, follow_symlinks=False)
                used += found.st_blocks * 512
                if stat.S_ISDIR(found.st_mode):
                    below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
                    open_folders.append(below)
                    inside.append(_names_in(below))
    except OSError:
        return UNCOUNTABLE
    finally:
        for one in open_folders:
            os.close(one)
    return used


def _names_in(folder: int) -> list[str]:
    """The names in an open folder, at most one more than MOST_FILES."""
    with os.scandir(folder) as entries:
        return [entry.name for entry in itertools.islice(entries, MOST_FILES + 1)]


def _unlinked(pid: int, folder: str) -> int:
    """Bytes of files that a process holds open and that have no name any more, on other file systems than `folder`'s.

    Those on a file system of a fixed size are counted with it already.
    """
    used = 0
    with suppress(OSError):
        own = os.stat(folder).st_dev if os.path.ismount(folder) else None
        for one in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found = one.stat()
                nameless = stat.S_ISREG(found.st_mode) and found.st_nlink == 0 and found.st_dev != own
                used += found.st_blocks * 512 if nameless else 0
    return used


def _close_all_but(kept: Sequence[int]) -> None:
    first = 3
    for number in sorted(kept):
        os.closerange(first, number)
        first = number + 1
    os.closerange(first, 1 << 16)


def _read_all(descriptor: int, deadline: float) -> bytes:
    found = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while selector.select(max(0.0, deadline - time.monotonic())):
            data = os.read(descriptor, READ_BYTES)
            if not data:
                return found
            found += data
    raise RuntimeError(f"the sandbox was not prepared within {PREPARE_S:g} s")


def _environment(folder: str) -> dict[str, str]:
    """Return the environment variables of a program: none of hone's."""
    path = [str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    python = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
    return {"PATH": ":".join(path), "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", **threads, **python}


def _text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


__all__ = ["Job", "attend", "ran_of", "read_inside", "request_of", "write_inside"]
