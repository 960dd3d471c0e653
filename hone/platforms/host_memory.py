"""What the C library does with host memory that is freed. Only glibc has these settings; elsewhere nothing happens.

A step on ten million tokens makes and drops hundreds of arrays of 80 MB. By itself glibc asks the system for each and
gives it back at once, and the system clears every page of it again: half of a driver's time.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST = (1 << 31) - 1  # bytes; an int


def keep_freed() -> None:
    """Have this process use memory again that it has freed, also for arrays of up to 1 GiB.

    It may then hold as much as it ever needed at once, until `give_back`. A glibc that refuses changes nothing.
    """
    if (library := _glibc()) is not None:
        library.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        library.mallopt(_M_TRIM_THRESHOLD, _LARGEST)


def give_back() -> None:
    """Give everything that was freed back to the system."""
    if (library := _glibc()) is not None:
        library.malloc_trim(0)


@lru_cache(maxsize=1)
def _glibc() -> Any:
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") and hasattr(library, "mallopt") else None
