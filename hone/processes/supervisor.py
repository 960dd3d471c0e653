"""Supervises one child process: `python -I -S supervisor.py COMMAND ...`, started by `hone.processes.tree`.

    hone --stdin (a pipe)--> stand-in --child--> supervisor --child--> command --> its children

The supervisor is the subreaper of the command: a process whose parent dies becomes the supervisor's child. So it can
end every process that the command started, also one in a session of its own. Its stand-in waits for it and exits with
its status: if somebody kills the children of hone (Ray does), the stand-in dies, and the supervisor lives to clean up.

The supervisor ends when the command ends, when hone writes `stop SECONDS`, and when hone is gone: the pipe closes, or
the stand-in's parent changes. Before it ends it kills the whole tree. If hone is gone it also removes the folder named
by HONE_SERVER_FOLDER. It uses the standard library only and is run by its path, so it starts fast in any interpreter.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
GLANCE_S = 0.2  # between two looks at the parent and at the command
KILL_S = 10.0  # what SIGKILL may take
FIRST_QUIET_S = 0.05  # without a process that runs, before the dead are reaped a second time
ORPHANED_S = 2.0  # what the command is given to end by itself after hone has died
LOST, UNKILLABLE = 120, 121  # exit statuses of the supervisor: hone was gone; some process could not be killed
FOLDER = "HONE_SERVER_FOLDER"  # environment variable: the command's private folder, if it has one
CHANNEL = "HONE_CHANNEL"  # environment variable: descriptor of the socket to hone, if the command has one


def main() -> None:
    """Run the command given as arguments until it ends or hone stops it or is gone; exit with its status."""
    parent = os.getpid()
    channel = [int(os.environ[CHANNEL])] if CHANNEL in os.environ else []
    if supervisor := os.fork():
        _close(channel)
        _stand_in(supervisor)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    child = subprocess.Popen(
        sys.argv[1:], stdin=subprocess.DEVNULL, process_group=0, preexec_fn=die_with_parent, pass_fds=channel
    )
    _close(channel)  # hone sees the command's end as the end of the socket
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # hone handles Ctrl-C and then writes `stop`
    grace_s, lost = _watch(child, parent)
    if child.poll() is None and grace_s > 0:
        child.terminate()
        _wait(child, grace_s)
    if not kill_tree(child):
        os._exit(UNKILLABLE)
    if lost and (folder := os.environ.get(FOLDER)):
        runpy.run_path(str(Path(__file__).with_name("leftovers.py")))["remove_folder"](folder)
    status = LOST if lost else child.returncode
    os._exit(status if status >= 0 else 128 - status)


def _close(descriptors: Sequence[int]) -> None:
    for one in descriptors:
        os.close(one)


def _stand_in(supervisor: int) -> NoReturn:
    """Exit as the supervisor does, and at once if hone is gone."""
    parent = os.getppid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while os.getppid() == parent:
        ended, status = os.waitpid(supervisor, os.WNOHANG)
        if ended and os.WIFSIGNALED(status):
            os.kill(os.getpid(), os.WTERMSIG(status))
        if ended:
            os._exit(os.WEXITSTATUS(status))
        signal.sigtimedwait({signal.SIGCHLD}, GLANCE_S)
    os._exit(LOST)


def _watch(child: subprocess.Popen[bytes], parent: int) -> tuple[float, bool]:
    """Wait for the command's end, for `stop`, or for the end of hone: (seconds the command may take, hone is gone)."""
    while child.poll() is None:
        readable, _, _ = select.select([0], [], [], GLANCE_S)
        if readable:
            word, _, seconds = os.read(0, 64).decode().partition("\n")[0].partition(" ")
            return (float(seconds), False) if word == "stop" else (ORPHANED_S, True)
        if os.getppid() != parent:
            return ORPHANED_S, True
    return 0.0, False


def _wait(child: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        sys.stderr.write(f"the server did not end within {seconds:g} s of SIGTERM and is killed\n")


def kill_tree(child: subprocess.Popen[bytes]) -> bool:
    """Kill every descendant of this process, the command `child` among them; False if some are left (`kill_below`)."""
    return kill_below(lambda: _reap(child))


def kill_below(reap: Callable[[], bool]) -> bool:
    """Send SIGKILL to every descendant of this process until all are reaped; False if some are left after `KILL_S`.

    `reap` reaps the dead, and is true if no child is left. A process in an uninterruptible call of the kernel may never
    end. A chain of processes that fork and end is faster than any list of them. So the dead are not reaped while
    something moves: each takes one of the processes that its user may have, and at the limit the chain stands still.
    """
    now = seen = time.monotonic()
    deadline, quiet_s = now + KILL_S, 0.0
    while now < deadline:
        below = descendants(os.getpid())
        for pid in below:
            _kill(pid)
        now = time.monotonic()
        if below:
            seen = now
        elif now >= seen + quiet_s:
            if reap():
                return True
            seen, quiet_s = now, 2 * quiet_s + FIRST_QUIET_S
        time.sleep(0.002)
    return False


def _reap(child: subprocess.Popen[bytes]) -> bool:
    """Reap ended processes, the command first because its exit status counts; True if no process is left."""
    try:
        while child.poll() is not None:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                return False
    except ChildProcessError:
        return True
    return False


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it has ended


def descendants(root: int) -> list[int]:
    """Process ids below `root` that run, parents before their children."""
    children: dict[int, list[int]] = {}
    for pid, parent, _ in processes():
        children.setdefault(parent, []).append(pid)
    found = list(children.get(root, ()))
    for pid in found:
        found += children.get(pid, ())
    return found


def session_of(leader: int) -> list[int]:
    """Process ids in the session that `leader` started; `leader` itself may have ended."""
    return [pid for pid, _, session in processes() if session == leader]


def supervisors_of(leader: int) -> list[int]:
    """The supervisors in the session that `leader` started."""
    found = []
    for pid in session_of(leader):
        with suppress(OSError):  # it has ended
            if __file__.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def processes() -> list[tuple[int, int, int]]:
    """(process id, parent's, session's) of every running process.

    A zombie with more than one thread runs too: its first thread has ended, and the others may run for ever.
    """
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        threads = int(fields[17])
        if fields[0] not in "ZX" or threads > 1:
            found.append((int(entry.name), int(fields[1]), int(fields[3])))
    return found


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def command_line(command: Sequence[str]) -> list[str]:
    """The command line that runs `command` under a supervisor."""
    return [sys.executable, "-I", "-S", __file__, *command]


if __name__ == "__main__":
    main()
