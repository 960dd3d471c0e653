"""cgroups: limits that the kernel holds for all processes of a program together, and for what it keeps for them.

    v2   <a group that this user may divide>/hone-sandboxes-.../<program>     memory.max, memory.swap.max, pids.max
    v1   the same below this process's own group in `memory` and in `pids`    memory.limit_in_bytes ..., pids.max

The warm parent owns the group of its programs, an attendant makes one below it for each program, and the program joins
that before it begins. Memory of the kernel counts: buffers of sockets and pipes, page tables, files of a tmpfs.

https://docs.kernel.org/admin-guide/cgroup-v2.html, .../cgroup-v1/memory.html and pids.html. Standard library only.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

NAME = "hone-sandboxes"
CONTROLLERS = ("memory", "pids")
MOVE_S, REMOVE_S = 5.0, 2.0  # to move a process, and until the kernel notices that a group is empty
MOST_MOVES = 10  # processes may start others meanwhile
NEAR = 1 << 20  # the kernel counts in batches
SPARE = 16 << 20  # bytes beyond the limits of memory and disk, for what the kernel keeps for the processes


class NoGroups(RuntimeError):
    """This process may not divide its cgroup; the message says why."""


@dataclass(frozen=True, slots=True)
class Group:
    """The group of one program: a folder of v2, or one in each tree of v1."""

    version: int
    folders: tuple[Path, ...]  # of v1: in the order of CONTROLLERS

    @property
    def memory(self) -> Path:
        return self.folders[0]

    def make(self) -> None:
        """Create the folders. Raises OSError."""
        for folder in self.folders:
            folder.mkdir(mode=0o755)

    def limit(self, memory_bytes: int, processes: int) -> None:
        """Set the limits. Raises OSError."""
        total = str(memory_bytes)
        if self.version == 2:
            _write(self.memory / "memory.max", total)
            optional = {"memory.swap.max": "0", "memory.oom.group": "1"}  # not on every kernel
        else:
            _write(self.memory / "memory.limit_in_bytes", total)
            optional = {"memory.memsw.limit_in_bytes": total}
        for name, value in optional.items():
            if (self.memory / name).exists():
                _write(self.memory / name, value)
        _write(self.folders[-1] / "pids.max", str(processes))

    def enter(self) -> None:
        """Move this process into the group; what it starts is in it, too. Raises OSError."""
        for folder in self.folders:
            _write(folder / "cgroup.procs", "0")

    def ran_out_of_memory(self) -> bool:
        """Return whether the kernel has killed a process because the group had reached its limit."""
        if self.version == 2:
            events = _numbers(self.memory / "memory.events")
            return bool(events.get("oom_kill") and (events.get("oom") or events.get("max")))
        if not _numbers(self.memory / "memory.oom_control").get("oom_kill"):
            return False
        limit, most = (_read(self.memory / f"memory.{name}_in_bytes") for name in ("limit", "max_usage"))
        return bool(limit and most) and int(most) >= int(limit) - NEAR  # memory.failcnt stays 0 on recent kernels

    def remove(self) -> None:
        """Remove the group and those below it; processes that are still in them are killed."""
        deadline = time.monotonic() + REMOVE_S
        for folder in self.folders:
            for one in (*folder.glob("*/"), folder):
                while not _removed(one) and time.monotonic() < deadline:
                    time.sleep(0.001)


@dataclass(frozen=True, slots=True)
class Groups:
    """The group of a warm parent, which holds one group for each program."""

    own: Group

    def of(self, name: str) -> Group:
        """The group of one program; it is not made."""
        return Group(self.own.version, tuple(folder / name for folder in self.own.folders))

    def __str__(self) -> str:
        return f"cgroup v{self.own.version}"


def own_groups() -> Groups:
    """Make a group for the programs of this process, and remove the groups of dead processes. Raises NoGroups."""
    reasons = []
    for version, parents in _candidates():
        _remove_leftovers(version, parents)
        group = Group(version, tuple(parent / _name() for parent in parents))
        try:
            _divide(group)
            return Groups(group)
        except OSError as error:
            group.remove()
            reasons.append(f"{error.filename or parents[0]}: {error.strerror or error}")
    raise NoGroups(reasons[0] if reasons else "this user may divide no cgroup that has memory and pids")


def _divide(group: Group) -> None:
    """Make a group, and see that a process can join one below it. Raises OSError."""
    if group.version == 2:
        try:
            _enable(group.memory.parent)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            _move_aside(group.memory.parent)  # a group that holds processes cannot be divided
            _enable(group.memory.parent)
    group.make()
    if group.version == 2:
        _enable(group.memory)
    trial = Groups(group).of("trial")
    trial.make()
    trial.limit(1 << 30, 1 << 10)
    child = os.fork()
    if child == 0:
        with suppress(OSError):
            trial.enter()
            os._exit(0)
        os._exit(1)
    deadline = time.monotonic() + MOVE_S
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.001)
    trial.remove()
    if ended != (child, 0):
        raise PermissionError(errno.EPERM, "no process can be moved there", str(trial.memory))


def _enable(parent: Path) -> None:
    """Give the groups below a group of v2 the controllers. Raises OSError."""
    if not {*CONTROLLERS} <= {*_read(parent / "cgroup.subtree_control").split()}:
        _write(parent / "cgroup.subtree_control", " ".join(f"+{name}" for name in CONTROLLERS))


def _move_aside(parent: Path) -> None:
    """Move the processes of a group into one below it, as systemd asks of services with `Delegate`. Raises OSError."""
    aside = parent / "hone"
    aside.mkdir(exist_ok=True)
    for _ in range(MOST_MOVES):
        pids = _read(parent / "cgroup.procs").split()
        if not pids:
            return
        for pid in pids:
            with suppress(ProcessLookupError):
                _write(aside / "cgroup.procs", pid)


def _candidates() -> Iterator[tuple[int, tuple[Path, ...]]]:
    """The groups that might be divided: version and folders. Of v2, those above this process's own come before it."""
    paths = _paths()
    for mount, root in _mounts("cgroup2", ""):
        own = _folder(mount, root, paths.get("", "/"))
        above = [one for one in own.parents if one == mount or mount in one.parents]
        for parent in (*above, own):
            if {*CONTROLLERS} <= {*_read(parent / "cgroup.controllers").split()} and os.access(parent, os.W_OK):
                yield 2, (parent,)
    trees = {name: _folder(*top, paths[name]) for name in paths for top in _mounts("cgroup", name)}
    if set(CONTROLLERS) <= trees.keys():
        yield 1, tuple(trees[name] for name in CONTROLLERS)


def _paths() -> dict[str, str]:
    """Controller ("" for v2) -> path of this process's group."""
    found: dict[str, str] = {}
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, names, path = line.split(":", 2)
        found |= dict.fromkeys(names.split(","), path)
    return found


def _mounts(kind: str, controller: str) -> Iterator[tuple[Path, str]]:
    """Places where trees of a kind are mounted, each with the group that is at its top."""
    for line in _read(Path("/proc/self/mountinfo")).splitlines():
        before, _, after = line.partition(" - ")
        fields, (found, _, options) = before.split(), after.split(" ", 2)
        if found == kind and (not controller or controller in options.strip().split(",")):
            yield Path(fields[4].replace("\\040", " ")), fields[3]


def _folder(mount: Path, root: str, path: str) -> Path:
    """The folder of a group with a `path` in its tree, of which the mount shows the part below `root`."""
    return mount / PurePosixPath(path).relative_to(root) if PurePosixPath(path).is_relative_to(root) else mount


def _name() -> str:
    """A name for this process's group: it is this process's as long as it lives."""
    return f"{NAME}-{os.stat('/proc/self/ns/pid').st_ino}-{os.getpid()}-{_started(os.getpid())}"


def _started(pid: int) -> str:
    """When a process was started, in the clock of the kernel; "" if it has ended."""
    return "".join(_read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[19:20])


def _remove_leftovers(version: int, parents: Sequence[Path]) -> None:
    """Remove the groups of processes that have died."""
    space = str(os.stat("/proc/self/ns/pid").st_ino)
    for parent in parents:
        for folder in parent.glob(f"{NAME}-{space}-*-*"):
            pid, started = folder.name.rsplit("-", 2)[1:]
            if pid.isdigit() and _started(int(pid)) != started:
                Group(version, (folder,)).remove()


def _removed(folder: Path) -> bool:
    """Return whether a group is gone; what is in it is killed."""
    for pid in _read(folder / "cgroup.procs").split():
        if pid != "0":  # a process of another PID namespace
            with suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)
    with suppress(OSError):
        folder.rmdir()
    return not folder.exists()


def _numbers(path: Path) -> dict[str, int]:
    """The numbers in a file with a name and a number in each line."""
    return {name: int(number) for name, number in (line.split() for line in _read(path).splitlines())}


def _read(path: Path) -> str:
    """The text of a file; "" if there is none."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8")
    return ""


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="ascii")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


__all__ = ["NAME", "SPARE", "Group", "Groups", "NoGroups", "own_groups"]
