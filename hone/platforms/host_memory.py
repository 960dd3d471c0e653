"""Control what the C library does with freed host memory. Only glibc has these settings; elsewhere nothing changes.

A step on ten million tokens allocates and frees hundreds of arrays of 80 MB. By default glibc returns each to the
system at once, and the system has to clear every page again, which took half of the driver's time.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from hone import machine

CLEAR_REFS = Path("/proc/self/clear_refs")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST = (1 << 31) - 1  # bytes; an int
_LITTLE = 0.25  # of the machine's memory
_GROWN = 1.1  # times the resident memory after the first step


def keep_freed() -> None:
    """Make this process reuse freed memory, for arrays of up to 1 GiB too.

    The process then holds its peak of memory until `give_back`. If glibc refuses, nothing changes.
    """
    if (library := _glibc()) is not None:
        library.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        library.mallopt(_M_TRIM_THRESHOLD, _LARGEST)


def give_back() -> None:
    """Return all freed memory to the system."""
    if (library := _glibc()) is not None:
        library.malloc_trim(0)


class StepMemory:
    """Returns freed memory to the system after a step, if little is free on this machine or the process has grown.

    Else the next step takes it again as it is; a page that was returned costs a fault and clearing (hundreds of
    thousands of them in a step). A process grows because freed memory is in pieces that the next array does not fit.
    """

    def __init__(self) -> None:
        self._allowed: float | None = None  # resident bytes; None: what the next step ends with decides

    def step_ended(self) -> None:
        total, free = machine.memory()
        resident, _ = machine.resident()
        if free < _LITTLE * total or resident > (self._allowed or resident):
            give_back()
            self._allowed = None
        elif self._allowed is None:
            self._allowed = _GROWN * resident


def forget_peak() -> None:
    """Let this process's peak of resident memory begin anew, where the system can (Linux: proc(5), clear_refs)."""
    with suppress(OSError):
        CLEAR_REFS.write_text("5", encoding="ascii")


@lru_cache(maxsize=1)
def _glibc() -> Any:
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") and hasattr(library, "mallopt") else None
