"""Ends a run in which nothing moves on: in this process, which under torchrun is one rank of several.

    main thread      phase begins -- phase ends -- an answer arrives -- ........ nothing ........ Stalled
                          |              |                |                                          ^
    watchdog thread   `progress()`: the time of the last sign of life; too long ago: stacks, then signal

A main thread in Python's own code, or in a system call, is ended by an exception, so that servers are stopped and the
error reaches the user. One that hangs inside a library (a collective) does not see it: then the process is ended. The
Ray runtime watches its ranks itself, and tells the driver's watchdog that it does.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from types import FrameType, TracebackType

from hone.runtime import ranks
from hone.runtime.base import Stalled

GRACE_S = 10.0  # how long the main thread may take to see that it is to end
LOOKS = 20  # looks at the clock within the timeout
EXIT_STALLED = 1
SIGNAL = signal.SIGUSR1

_active: Watchdog | None = None


def progress() -> None:
    """Say that the run of this process goes on: an answer has come, a wait that has a deadline of its own goes on."""
    if _active is not None:
        _active.note()


class Watchdog:
    """A context: while it is open, a run without progress for `timeout_s` ends with its stacks printed.

    Raises Stalled in the main thread. Where that does not see it within `GRACE_S`, or the context was not entered by
    the main thread, the process ends with code `EXIT_STALLED`.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._phase = "start"
        self._since = self._last = time.monotonic()
        self._over = threading.Event()
        self._seen = threading.Event()  # the main thread has been told
        self._ending = threading.Lock()  # no signal may come once the handler is gone: unhandled, it ends the process
        self._handler: object = None

    def begins(self, phase: str) -> None:
        """A phase begins; empty: none is left."""
        self._phase = phase or "between phases"
        self._since = self._last = time.monotonic()

    def note(self) -> None:
        self._last = time.monotonic()

    def __enter__(self) -> Watchdog:
        global _active
        if _active is not None:
            raise RuntimeError("a run of this process is watched already")
        _active = self
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(SIGNAL, self._raise)
        self.note()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _active
        _active = None
        with self._ending:
            self._over.set()
        if self._handler is not None:
            signal.signal(SIGNAL, self._handler)  # type: ignore[arg-type]  # what `signal.signal` gave

    def _watch(self) -> None:
        while not self._over.wait(min(self._timeout_s / LOOKS, 1.0)):
            if time.monotonic() - self._last < self._timeout_s:
                continue
            self._report()
            if self._handler is None:
                os._exit(EXIT_STALLED)
            self._seen.clear()
            with self._ending:
                if self._over.is_set():
                    return
                signal.pthread_kill(_main().ident or 0, SIGNAL)
            if not self._seen.wait(GRACE_S):
                _say("it does not answer, so its process is ended")
                os._exit(EXIT_STALLED)
            self.note()  # what is left, closing and saving, has the same time

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self._seen.set()
        raise Stalled(self._message())

    def _message(self) -> str:
        return (
            f"{_where()}: no progress in phase {self._phase} for runtime.stall_timeout_s={self._timeout_s:g}; "
            "its stack has been printed"
        )

    def _report(self) -> None:
        frames = sys._current_frames()
        main = _main().ident
        _say(f"{_where()}: {self._phase} for {time.monotonic() - self._since:.0f} s")
        for thread in threading.enumerate():
            frame = frames.get(thread.ident or 0)
            if frame is None or thread is threading.current_thread():
                continue
            if thread.ident != main:
                _say(f"  thread {thread.name}:")
            _say("".join(f"    {line}\n" for entry in traceback.format_stack(frame) for line in entry.splitlines()))


def _main() -> threading.Thread:
    return threading.main_thread()


def _where() -> str:
    return f"rank {ranks.rank()} of {ranks.ranks()} on node {socket.gethostname()} (process {os.getpid()})"


def _say(text: str) -> None:
    sys.stderr.write(text.rstrip("\n") + "\n")
    sys.stderr.flush()
