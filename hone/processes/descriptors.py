"""File descriptors of this process: raise the limit, and wait when none is free.

A process without a free descriptor cannot open a connection, and that says nothing about the other side.
"""

from __future__ import annotations

import asyncio
import errno
import resource
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

MOST = 1 << 20  # descriptors; some programs close every number up to the limit when they start
AGAIN_S = 0.1  # between two attempts

R = TypeVar("R")


class OutOfDescriptors(RuntimeError):
    """This process or this machine had no free file descriptor."""


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard one, for this process and its children; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return MOST if soft == resource.RLIM_INFINITY else soft


def open_descriptors() -> int:
    """Return the number of descriptors that this process has open; 0 where the system does not say."""
    folder = Path("/proc/self/fd")
    return sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0


def is_exhausted(error: BaseException | None) -> bool:
    """Return whether an error, or one that caused it, is the lack of a free descriptor."""
    while error is not None:
        if isinstance(error, OutOfDescriptors) or getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
            return True
        error = error.__cause__ or error.__context__
    return False


async def when_free(attempt: Callable[[], Awaitable[R]], timeout_s: float) -> R:
    """Call `attempt`, and again while no descriptor is free, until the deadline. Raises OutOfDescriptors."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return await attempt()
        except Exception as error:
            if not is_exhausted(error):
                raise
            if time.monotonic() >= deadline:
                raise OutOfDescriptors(
                    f"no file descriptor was free for {timeout_s:g} s ({error}): {open_descriptors()} are open and "
                    f"{raise_limit()} are allowed; raise the hard limit (ulimit -Hn), or lower "
                    "rollout.requests_per_replica"
                ) from error
        await asyncio.sleep(AGAIN_S)


__all__ = ["OutOfDescriptors", "is_exhausted", "open_descriptors", "raise_limit", "when_free"]
