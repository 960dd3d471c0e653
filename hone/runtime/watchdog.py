"""End a run that makes no progress. Each process has its own watchdog.

    main thread      phase begins -- phase ends -- an answer arrives -- ........ nothing ........ Stalled
                          |              |                |                                          ^
    watchdog thread   `progress()` records the time; if it is too long ago: print stacks, send a signal

A main thread in Python code or in a system call gets an exception, so that servers are stopped and the user sees the
error. A main thread that hangs inside a library (a collective) does not get it; then the process is ended. The Ray
runtime watches its ranks itself and reports progress to the driver's watchdog.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from types import FrameType, TracebackType

from hone.deadline import Stalled
from hone.processes.closing import stacks
from hone.runtime import ranks

GRACE_S = 10.0  # how long the main thread may take to raise the exception
LOOKS = 20  # checks of the clock within the timeout
EXIT_STALLED = 1
SIGNAL = signal.SIGUSR1

_active: Watchdog | None = None


def progress() -> None:
    """Report progress: an answer arrived, or a wait with its own deadline continues."""
    if _active is not None:
        _active.note()


class Watchdog:
    """A context that prints all stacks and ends the run if there is no progress for `timeout_s`.

    Raises Stalled in the main thread. If the main thread does not raise it within `GRACE_S`, or did not enter the
    context itself, the process ends with code `EXIT_STALLED`.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._phase = "start"
        self._since = self._last = time.monotonic()
        self._over = threading.Event()
        self._seen = threading.Event()  # the main thread has raised
        self._ending = threading.Lock()  # no signal after the handler is removed: unhandled, it ends the process
        self._handler: object = None

    def begins(self, phase: str) -> None:
        """A phase begins; empty: no phase is running."""
        self._phase = phase or "between phases"
        self._since = self._last = time.monotonic()

    def note(self) -> None:
        self._last = time.monotonic()

    def __enter__(self) -> Watchdog:
        global _active
        if _active is not None:
            raise RuntimeError("this process already has a watchdog; close it first")
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
            signal.signal(SIGNAL, self._handler)  # type: ignore[arg-type]  # the previous handler

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
            self.note()  # closing and saving get the same time

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self._seen.set()
        raise Stalled(self._message())

    def _message(self) -> str:
        return (
            f"{_where()}: no progress in phase {self._phase} for runtime.stall_timeout_s={self._timeout_s:g}; "
            "its stack has been printed"
        )

    def _report(self) -> None:
        _say(f"{_where()}: {self._phase} for {time.monotonic() - self._since:.0f} s")
        _say(stacks())


def _main() -> threading.Thread:
    return threading.main_thread()


def _where() -> str:
    return f"rank {ranks.rank()} of {ranks.ranks()} on node {socket.gethostname()} (process {os.getpid()})"


def _say(text: str) -> None:
    sys.stderr.write(text.rstrip("\n") + "\n")
    sys.stderr.flush()
