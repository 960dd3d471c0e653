"""Keeps a server's process tree on a short leash: `python -I -S keeper.py COMMAND ...`, started by `ServerProcess`.

    hone --stdin (a pipe)--> stand-in --child--> keeper --child--> server --> its children, wherever they hide

The keeper is the subreaper of the tree: a process whose parent dies becomes its child, so none can get out of reach.
Its stand-in waits for it and ends as it did: whoever ends a process of hone together with its children (Ray does)
finds that one, and the keeper lives to put things in order. It ends when the server ends, when it is told to
(`stop SECONDS`), and when hone is gone, however that died: the pipe closes, or the stand-in ends, as it does when its
own parent's process id changes. Before it ends, every process of the tree has ended; if hone is gone, it removes the
server's folder (HONE_SERVER_FOLDER), as hone would have. Standard library only, and run by its path: it must start at
once, in any interpreter, and outlive whatever goes wrong in hone.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
GLANCE_S = 0.2  # between two looks at the parent and at the server
KILL_S = 10.0  # what SIGKILL may take
ORPHANED_S = 2.0  # what a server is given to end by itself after hone has died
LOST, UNKILLABLE = 120, 121  # exit statuses of the keeper: hone was gone; some process did not go
FOLDER = "HONE_SERVER_FOLDER"  # environment variable: the server's private folder, if it has one


def main() -> None:
    """Run the command given as arguments until it ends or nobody wants it any more; exit with its status."""
    parent = os.getpid()
    if keeper := os.fork():
        _stand_in(keeper)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, process_group=0, preexec_fn=die_with_parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a Ctrl-C is hone's to handle: it says `stop`
    grace_s, lost = _watch(server, parent)
    if server.poll() is None:
        server.terminate()
        _wait(server, grace_s)
    if not kill_tree(server):
        os._exit(UNKILLABLE)
    if lost and (folder := os.environ.get(FOLDER)):
        shutil.rmtree(folder, ignore_errors=True)
    status = LOST if lost else server.returncode
    os._exit(status if status >= 0 else 128 - status)


def _stand_in(keeper: int) -> NoReturn:
    """Be what hone sees of the keeper: end as it does, and at once if hone is gone."""
    parent = os.getppid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while os.getppid() == parent:
        ended, status = os.waitpid(keeper, os.WNOHANG)
        if ended and os.WIFSIGNALED(status):
            os.kill(os.getpid(), os.WTERMSIG(status))
        if ended:
            os._exit(os.WEXITSTATUS(status))
        signal.sigtimedwait({signal.SIGCHLD}, GLANCE_S)
    os._exit(LOST)


def _watch(server: subprocess.Popen[bytes], parent: int) -> tuple[float, bool]:
    """Wait for the server's end, for `stop`, or for the end of hone: (seconds the server may take, whether lost)."""
    while server.poll() is None:
        readable, _, _ = select.select([0], [], [], GLANCE_S)
        if readable:
            word, _, seconds = os.read(0, 64).decode().partition(" ")
            return (float(seconds), False) if word == "stop" else (ORPHANED_S, True)
        if os.getppid() != parent:
            return ORPHANED_S, True
    return 0.0, False


def _wait(server: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        server.wait(seconds)
    except subprocess.TimeoutExpired:
        sys.stderr.write(f"the server did not end within {seconds:g} s of SIGTERM and is killed\n")


def kill_tree(server: subprocess.Popen[bytes]) -> bool:
    """SIGKILL to every descendant of this process, their reaper, until none is left; whether that came true.

    A process in an uninterruptible call of the kernel may never go.
    """
    deadline = time.monotonic() + KILL_S
    while (living := descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in living:
            _kill(pid)
        _reap(server)
        time.sleep(0.01)
    _reap(server)
    return not living


def _reap(server: subprocess.Popen[bytes]) -> None:
    """Take leave of the dead: of the server first, whose exit status counts."""
    try:
        while server.poll() is not None and os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it ended by itself meanwhile


def descendants(root: int) -> list[int]:
    """Process ids below `root`, zombies left out: parents before their children."""
    children: dict[int, list[int]] = {}
    for pid, parent, _ in processes():
        children.setdefault(parent, []).append(pid)
    found = list(children.get(root, ()))
    for pid in found:
        found += children.get(pid, ())
    return found


def session_of(leader: int) -> list[int]:
    """Process ids in the session that `leader` began, which are there even if it is not."""
    return [pid for pid, _, session in processes() if session == leader]


def keepers_of(leader: int) -> list[int]:
    """Those of them that are keepers."""
    found = []
    for pid in session_of(leader):
        with suppress(OSError):  # it has ended meanwhile
            if __file__.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def processes() -> list[tuple[int, int, int]]:
    """(process id, parent's, session's) of every process that runs; zombies are left out."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if fields[0] not in "ZX":
            found.append((int(entry.name), int(fields[1]), int(fields[3])))
    return found


def die_with_parent() -> None:
    """From now on, the kernel kills this process when the thread that started it ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def command_line(command: Sequence[str]) -> list[str]:
    """What starts `command` under a keeper."""
    return [sys.executable, "-I", "-S", __file__, *command]


if __name__ == "__main__":
    main()
