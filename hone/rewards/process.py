"""One reward process as its owner sees it: started, written to, read from with a deadline, killed."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import IO, Any

from hone.rewards.frames import BrokenFrame, FrameBuffer

LOG = logging.getLogger("hone.rewards")
SEND_TIMEOUT_S = 30.0  # an idle worker empties its pipe at once; only a stopped process does not
REAP_TIMEOUT_S = 10.0
LAST_LINES = 8  # of what the process printed, kept for the report of its death

# The interpreter is started without the current folder on its path, so that a stray `random.py` there shadows nothing
# before hone is imported; then it gets the path of its parent, and the current folder last.
BOOT = """
import runpy, sys
sys.argv, sys.path = sys.argv[1:3], sys.argv[3:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
MODULE = "hone.rewards.worker"


class WorkerDied(RuntimeError):
    """The process ended, or broke the protocol."""


class WorkerProcess:
    """Used by one thread, which must outlive the process: the kernel kills it when the thread that forked it ends."""

    def __init__(self, module: str = MODULE, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        """`module` is run as a program, with the parent's process id as its argument; `environment` adds variables."""
        self._buffer = FrameBuffer()
        self._printed: deque[str] = deque(maxlen=LAST_LINES)
        self._partial = b""
        path = [entry or os.getcwd() for entry in sys.path]
        command = [sys.executable, "-P", "-c", BOOT, module, str(os.getpid()), *path, os.getcwd()]
        pipe = subprocess.PIPE
        # unbuffered: this side polls the descriptors; a session of its own: Ctrl-C is for hone, and a kill takes
        # whatever the reward started with it
        self._process = subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            bufsize=0,
            start_new_session=True,
            env=_environment(environment),
        )
        self._poll = select.poll()
        for stream in (self._process.stdout, self._process.stderr):
            self._poll.register(_descriptor(stream), select.POLLIN)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            os.set_blocking(_descriptor(stream), False)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, frame: bytes) -> None:
        """Write a frame. Raises WorkerDied if the process is gone or does not read."""
        descriptor = _descriptor(self._process.stdin)
        view = memoryview(frame)
        writable = select.poll()
        writable.register(descriptor, select.POLLOUT)
        deadline = time.monotonic() + SEND_TIMEOUT_S
        while view:
            if not writable.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise WorkerDied(f"the reward process {self.pid} read nothing for {SEND_TIMEOUT_S:g} s")
            try:
                view = view[os.write(descriptor, view) :]
            except BlockingIOError:
                continue
            except BrokenPipeError as error:
                raise self._death() from error

    def receive(self, timeout_s: float) -> list[dict[str, Any]]:
        """The messages that have arrived, at least one; none if the deadline passed. Raises WorkerDied."""
        deadline = time.monotonic() + timeout_s
        output = _descriptor(self._process.stdout)
        while True:
            ready = dict(self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
            if not ready:
                return []
            if _descriptor(self._process.stderr) in ready:
                self._read_printed()
            if output not in ready:
                continue
            messages = self._read_messages(output)
            if messages:
                return messages

    def _read_messages(self, output: int) -> list[dict[str, Any]]:
        data = os.read(output, 1 << 18)
        if not data:
            raise self._death()
        try:
            return self._buffer.feed(data)
        except BrokenFrame as error:
            raise WorkerDied(f"the reward process {self.pid} broke the protocol: {error}") from error

    def _read_printed(self) -> None:
        """What the functions print is logged, and its end is kept."""
        descriptor = _descriptor(self._process.stderr)
        try:
            data = os.read(descriptor, 1 << 18)
        except BlockingIOError:
            return
        if not data:
            with contextlib.suppress(KeyError):  # the end may be met twice
                self._poll.unregister(descriptor)
            return
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            text = line.decode("utf-8", "replace").rstrip()
            self._printed.append(text)
            LOG.info("reward process %d: %s", self.pid, text)

    def _death(self) -> WorkerDied:
        """The end of the output: how the process ended, and its last words."""
        try:
            code = self._process.wait(REAP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return WorkerDied(f"the reward process {self.pid} closed its output")
        self._read_printed()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        words = " | ".join(line for line in self._printed if line)
        return WorkerDied(f"the reward process {how}" + (f"; it printed: {words}" if words else ""))

    def stop(self) -> None:
        """Kill the process and what it started. May be called from another thread than the owner's."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself
                os.killpg(self.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the process, wait for its end, and free its pipes."""
        self.stop()
        self._process.wait(REAP_TIMEOUT_S)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()


def _descriptor(stream: IO[bytes] | None) -> int:
    assert stream is not None  # all three are pipes
    return stream.fileno()


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    """One thread per process unless asked otherwise, and sets of strings in the same order in every process."""
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONHASHSEED": "0", **more}
