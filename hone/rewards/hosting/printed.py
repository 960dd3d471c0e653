"""Text that reward functions print, by call. It also goes to the log of the process, as before.

    print() in a function --> _Tee --> the process's standard output: servers' and rewards' logs
                                '----> the running call: its beginning and its end --> the answer's record

A call is known by a context variable, so coroutines that wait at the same time do not mix. Text of a thread that the
function starts, and of programs and C code, goes to the log alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TextIO

HEAD = TAIL = 1_000  # characters of a call that are kept

_running: ContextVar[Printed | None] = ContextVar("running", default=None)


class Printed:
    """Text that one call has printed so far."""

    def __init__(self) -> None:
        self._head = self._tail = ""
        self._left_out = 0

    def add(self, text: str) -> None:
        """Keep the first and the last characters."""
        room = HEAD - len(self._head)
        rest = self._tail + text[room:]
        self._head += text[:room]
        self._left_out += max(len(rest) - TAIL, 0)
        self._tail = rest[-TAIL:]

    def __str__(self) -> str:
        between = f"\n... ({self._left_out:,} characters are left out) ...\n" if self._left_out else ""
        return f"{self._head}{between}{self._tail}"


class _Tee:
    """A text stream that also gives what is written to the running call."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if (call := _running.get(None)) is not None:
            call.add(text)
        return self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __enter__(self) -> _Tee:
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_stream":  # a copy of it asks before it has a stream
            raise AttributeError(name)
        return getattr(self._stream, name)


def watch_output() -> None:
    """Give each call what it prints, from now on. Call it before user code keeps a stream of its own."""
    sys.stdout, sys.stderr = _Tee(sys.stdout), _Tee(sys.stderr)


@contextmanager
def one_call() -> Iterator[Printed]:
    """Collect what is printed in the block, by this thread or coroutine."""
    call = Printed()
    before = _running.set(call)
    try:
        yield call
    finally:
        _running.reset(before)
