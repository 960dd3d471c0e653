"""A Python child process that gets requests over a socket and replies before a deadline (`request_loop.py` is its end).

    RequestProcess <==socket: frames==> child, under a supervisor (tree.py)
                   <--pipe: stdout, stderr-- read by a thread: keeps the last lines, writes a log file

A reply counts only if it comes from the process that said hello and belongs to the current request. What the child
prints cannot fill the memory, delay a reply or move a deadline. It has a temporary folder (TMPDIR) of its own, which
is removed after it has ended, with all that a killed process left there.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hone.processes.frames import BrokenFrame, Frame, FrameReader, Kind, encode
from hone.processes.leftovers import remove_folder
from hone.processes.supervisor import FOLDER
from hone.processes.tree import ProcessTree

LOG = logging.getLogger("hone.processes")
SEND_S = 30.0  # an idle child reads at once; a stopped one does not
SILENT_S = 300.0  # a child that loads something beats every 5 s
END_S = 10.0  # how long a child whose socket is closed may take to end
REPLY_BYTES = 16 << 20  # of one reply
READ_BYTES = 1 << 16
PAUSE_S = 0.05  # after a full read: at most 1.3 MB/s of output are read; a child that prints more has to wait
TAIL_BYTES, LAST_LINES, LINE_CHARACTERS = 8192, 8, 400
LOG_BYTES = 16 << 20  # of one child's output are written to its log

FULL = b"\n(this log has its full size: later output of this process is not written)\n"

# The interpreter is started without the current folder on its path, so that a stray `random.py` there shadows nothing
# before hone is imported; then it gets the path of its parent, and the current folder last.
BOOT = """
import runpy, sys
sys.argv, sys.path = sys.argv[1:2], sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


class ChildLost(RuntimeError):
    """The process ended, was silent for too long, or did not keep to the protocol; the message has its last lines."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """Command, environment and limits of a child process."""

    name: str  # for errors: `reward process`
    module: str  # run as a program; it constructs a `RequestLoop`
    environment: Mapping[str, str] = field(default_factory=dict)  # added to hone's
    log: Path | None = None  # gets what the child prints, up to `LOG_BYTES`


class RequestProcess:
    """Constructing starts the process. One thread uses it; `stop` may be called from any thread."""

    def __init__(self, spec: ChildSpec) -> None:
        """Raises OSError if the process cannot be started."""
        self._name = spec.name
        self._reader = FrameReader(REPLY_BYTES)
        self._batch = 0
        self._process_id = 0  # once it has said hello
        path = [entry or os.getcwd() for entry in sys.path]
        command = [sys.executable, "-P", "-c", BOOT, spec.module, *path, os.getcwd()]
        self._socket, theirs = socket.socketpair()
        source, sink = os.pipe()
        self._folder = tempfile.mkdtemp(prefix="hone-child-")
        os.chmod(self._folder, 0o711)  # root's sandboxes have users of their own, which must reach their folders
        variables = {**spec.environment, "TMPDIR": self._folder, FOLDER: self._folder}
        try:
            self._tree = ProcessTree(command, variables, sink, theirs.fileno())
        except BaseException:
            self._socket.close()
            os.close(source)
            os.rmdir(self._folder)
            raise
        finally:
            theirs.close()
            os.close(sink)
        self._output = _Output(source, spec)

    @property
    def pid(self) -> int:
        """The child's process id; 0 before it said hello."""
        return self._process_id

    @property
    def alive(self) -> bool:
        """Return whether the process has its end of the socket."""
        asked = select.poll()
        asked.register(self._socket, 0)
        return not asked.poll(0)

    def hello(self, body: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Tell the child what to load; returns its reply. Raises ChildLost, also if it is not ready in time."""
        self._send(encode(Kind.HELLO, 0, body))
        deadline = time.monotonic() + timeout_s
        heard = time.monotonic()
        while time.monotonic() < deadline:
            frames = self._read(min(deadline, heard + SILENT_S))
            if not frames and time.monotonic() >= heard + SILENT_S:
                raise ChildLost(f"the {self._name} gave no sign of life for {SILENT_S:g} s while it started")
            heard = time.monotonic()
            for frame in frames:
                if frame.kind is Kind.HELLO:
                    self._process_id = frame.process
                    return frame.body
        raise ChildLost(f"the {self._name} was not ready after {timeout_s:g} s{self._printed()}")

    def request(self, body: str) -> None:
        """Send the next request, the JSON text of an object. Replies to earlier requests are dropped from now on."""
        self._batch += 1
        self._send(encode(Kind.REQUEST, self._batch, body))

    def replies(self, deadline: float) -> list[dict[str, Any]]:
        """Wait for replies to the current request; none if `deadline` (monotonic) passes. Raises ChildLost."""
        while time.monotonic() < deadline:
            if found := [frame.body for frame in self._read(deadline) if self._counts(frame)]:
                return found
        return []

    def _counts(self, frame: Frame) -> bool:
        """Return whether a frame answers the current request and is from the child itself, not a forked copy."""
        return frame.kind is Kind.REPLY and (frame.process, frame.batch) == (self._process_id, self._batch)

    def _send(self, data: bytes) -> None:
        self._socket.settimeout(SEND_S)
        try:
            self._socket.sendall(data)
        except TimeoutError as error:
            raise ChildLost(f"the {self._name} read nothing for {SEND_S:g} s") from error
        except OSError as error:
            raise self._death() from error

    def _read(self, deadline: float) -> list[Frame]:
        """The frames that came; none if `deadline` passed or a frame is not complete yet."""
        self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
        frames: list[Frame] = []
        try:
            frames.extend(self._reader.feed(b""))  # the last call may have found a broken one behind others
            data = self._socket.recv(1 << 18)
            frames.extend(self._reader.feed(data))  # has those before a broken one
        except TimeoutError:
            return []
        except BrokenFrame as error:
            if frames:
                return frames
            raise ChildLost(f"the {self._name} broke the protocol: {error}") from error
        except OSError as error:
            raise self._death() from error
        if not data:
            raise self._death()
        return frames

    def _death(self) -> ChildLost:
        """Return the end of the process and its last lines."""
        deadline = time.monotonic() + END_S
        while self._tree.alive and time.monotonic() < deadline:
            time.sleep(0.005)
        if self._tree.alive:
            return ChildLost(f"the {self._name} closed its socket{self._printed()}")
        self._output.finish()
        return ChildLost(f"the {self._name} ended with {self._tree.ended}{self._printed()}")

    def _printed(self) -> str:
        lines = self._output.last_lines()
        return f"; it printed: {' | '.join(lines)}" if lines else ""

    def stop(self) -> None:
        """Tell the supervisor to kill the process and everything it started; do not wait. For any thread."""
        self._tree.ask_to_end(0)

    def kill(self) -> None:
        """Kill the process and everything it started, wait until they have ended, and remove what they leave."""
        for _ in self._tree.ending(0):
            time.sleep(0.005)
        self._output.finish()
        self._socket.close()
        remove_folder(self._folder)


class _Output:
    """Reads what a child prints until no process of its tree can print any more."""

    def __init__(self, source: int, spec: ChildSpec) -> None:
        self._tail = self._partial = b""
        self._left = LOG_BYTES
        self._name, self._log = spec.name, spec.log
        self._thread = threading.Thread(target=self._drain, args=(source,), name="output of a child", daemon=True)
        self._thread.start()

    def _drain(self, source: int) -> None:
        with open(source, "rb", buffering=0) as pipe:
            while data := pipe.read(READ_BYTES):
                self._tail = (self._tail + data)[-TAIL_BYTES:]
                self._write(data)
                if LOG.isEnabledFor(logging.INFO):
                    self._log_lines(data)
                if len(data) == READ_BYTES:
                    time.sleep(PAUSE_S)

    def _log_lines(self, data: bytes) -> None:
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > TAIL_BYTES:
            lines, self._partial = [*lines, self._partial], b""
        for line in lines:
            LOG.info("%s: %s", self._name, line.decode("utf-8", "replace"))

    def _write(self, data: bytes) -> None:
        if self._log is None or self._left <= 0:
            return
        kept = data[: self._left]
        self._left -= len(kept)
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)  # only once there is something to write
            with self._log.open("ab") as log:
                log.write(kept if self._left > 0 else kept + FULL)
        except OSError:  # a full disk: reading goes on, so that the child does not block
            self._left = 0

    def last_lines(self) -> list[str]:
        lines = self._tail.decode("utf-8", "replace").splitlines()
        return [line.rstrip()[-LINE_CHARACTERS:] for line in lines if line.strip()][-LAST_LINES:]

    def finish(self) -> None:
        """Read what is left in the pipe."""
        self._thread.join(END_S)


__all__ = ["ChildLost", "ChildSpec", "RequestProcess"]
