"""Frequency of Python's garbage collector in a process of hone."""

from __future__ import annotations

import atexit
import gc

OBJECTS = 20_000
"""New objects between two collections. With Python's own 700 (CPython 3.11) the collector looks at everything thirty
times while torch and transformers are imported, which takes 3.6 s instead of 2.8 (AMD EPYC)."""


def collect_rarely() -> None:
    """Collect garbage less often from now on, and not at the process's end; call it before large imports.

    Before it ends, Python looks at everything several times, which takes a second with an engine's modules (AMD EPYC),
    to free memory that the system takes back anyway. Exit handlers and `weakref.finalize` run as always; `__del__` of
    objects in a cycle does not, so a file that such an object holds has to be closed before.
    """
    gc.set_threshold(OBJECTS)
    atexit.register(gc.freeze)


__all__ = ["collect_rarely"]
