"""A command that runs under a supervisor, with every process that it starts.

    ProcessTree --stdin: stop SECONDS--> supervisor (supervisor.py) --> command --> its children
                <------- exit status -------------------------------- all of them have ended

It has a session of its own, so Ctrl-C reaches hone only. The tree ends when `ending` is called, when the command ends,
and when hone itself is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import IO

from hone.processes.supervisor import (
    CHANNEL,
    KILL_S,
    ORPHANED_S,
    UNKILLABLE,
    command_line,
    descendants,
    session_of,
    supervisors_of,
)

END_S = 15.0  # what killing a tree may take beyond the time that the command was given


class Unkillable(RuntimeError):
    """Processes of a tree that did not end after SIGKILL."""


class ProcessTree:
    """Constructing starts the command. Raises OSError if that is not possible."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: IO[bytes] | int,  # a file or a descriptor
        channel: int | None = None,
    ) -> None:
        """`environment` is added to hone's, `output` gets stdout and stderr, `channel` is a socket for the command."""
        variables = {**os.environ, **environment, **({} if channel is None else {CHANNEL: str(channel)})}
        self._process = subprocess.Popen(
            command_line(command),
            env=variables,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=() if channel is None else (channel,),
        )
        self._swept = False

    @property
    def pid(self) -> int:
        """The process id of the supervisor's stand-in, which leads the session."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def ended(self) -> str:
        """Return the end of the command: `exit status 3`, `signal SIGKILL`; empty while it runs."""
        status = self._process.poll()
        if status is None:
            return ""
        number = -status if status < 0 else status - 128
        if number in {int(known) for known in signal.Signals}:
            return f"signal {signal.Signals(number).name}"
        return f"exit status {status}"

    def process_ids(self) -> list[int]:
        """The command's process and everything below it; empty if it has ended."""
        return descendants(self.pid)[1:] if self.alive else []

    def ask_to_end(self, grace_s: float) -> None:
        """Tell the supervisor to end the tree: SIGTERM, and SIGKILL after `grace_s` seconds; 0: SIGKILL at once."""
        pipe = self._process.stdin
        assert pipe is not None
        with suppress(BrokenPipeError, ValueError):  # the supervisor has ended, or the pipe is closed
            pipe.write(f"stop {grace_s:g}\n".encode())
            pipe.flush()

    def ending(self, grace_s: float) -> Iterator[None]:
        """End the tree. Yields while it ends: the caller sleeps a moment, in a thread or on an event loop.

        Raises Unkillable for processes that did not end.
        """
        if self.alive:
            self.ask_to_end(grace_s)
            deadline = time.monotonic() + grace_s + END_S
            while self.alive and time.monotonic() < deadline:
                yield
        left: list[int] = []
        if not self._swept and (self.alive or self._process.returncode < 0):
            self._swept = True  # once: later the id of the session may belong to another program
            left = yield from self._sweep()
        with suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        if left or self._process.returncode == UNKILLABLE:
            raise Unkillable(f"processes that cannot be killed {left or ''}".rstrip())

    def _sweep(self) -> Generator[None, None, list[int]]:
        """Do the supervisor's work if it was killed or hangs; returns the process ids that are left.

        If only its stand-in was killed, the supervisor ends the tree itself and is given the time to.
        """
        deadline = time.monotonic() + ORPHANED_S + KILL_S
        while not self.alive and supervisors_of(self.pid) and time.monotonic() < deadline:
            yield
        self._process.kill()
        deadline = time.monotonic() + END_S
        while (left := session_of(self.pid)) and time.monotonic() < deadline:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.poll()
            yield
        return left


__all__ = ["END_S", "ProcessTree", "Unkillable"]
