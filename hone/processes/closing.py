"""The deadline of what a process does at its end: closing a run, and leaving the interpreter.

Foreign code may hang there: a tool's thread, a library's exit handler. Then the process ends all the same, with an exit
code and the stacks that say so, and the supervisors of its child processes end those.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_LATE = 1


@contextmanager
def ends_within(timeout_s: float, what: str, code: int = EXIT_LATE) -> Iterator[None]:
    """Give a block a deadline, after which the process ends with `code`."""
    over = threading.Event()
    _start_deadline(timeout_s, what, code, over)
    try:
        yield
    finally:
        over.set()


def exits_within(timeout_s: float, code: int) -> None:
    """Give the interpreter's own end a deadline; call it right before the exit.

    From here on the process ends with `code`: it ignores SIGTERM and Ctrl-C, which would give it another one.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # Python puts back handlers of its own while it ends, but not this one
    _start_deadline(timeout_s, "leaving the interpreter", code, threading.Event())


def _start_deadline(timeout_s: float, what: str, code: int, over: threading.Event) -> None:
    def watch() -> None:
        if over.wait(timeout_s):
            return
        sys.stderr.write(f"error: {what} took longer than {timeout_s:g} s: the process ends with exit code {code}\n")
        sys.stderr.write(stacks())
        sys.stderr.flush()
        os._exit(code)

    threading.Thread(target=watch, name="deadline of closing", daemon=True).start()


def stacks() -> str:
    """The stacks of all other threads, the main thread's without its name."""
    frames = sys._current_frames()
    lines: list[str] = []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if frame is None or thread is threading.current_thread():
            continue
        if thread is not threading.main_thread():
            lines.append(f"  thread {thread.name}:")
        lines += [f"    {line}" for entry in traceback.format_stack(frame) for line in entry.splitlines()]
    return "\n".join([*lines, ""])


__all__ = ["EXIT_LATE", "ends_within", "exits_within", "stacks"]
