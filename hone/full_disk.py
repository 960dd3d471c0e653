"""A full disk: whoever writes the record of a run tries again for a while, because somebody may make room.

    until_room(lambda: path.write_text(text))     a file that is written as a whole

    since = 0.0                                   a file that grows
    while rest:
        try:
            rest = rest[os.write(file, rest) :]
        except OSError as error:
            since = wait_for_room(error, since)

Each rank waits for its own files, and the others wait for the rank.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from typing import TypeVar

R = TypeVar("R")

LOG = logging.getLogger("hone")
PATIENCE_S = 120.0  # then the run stops so that it can be continued
PAUSE_S = 0.2
FULL = (errno.ENOSPC, errno.EDQUOT)


def do_not_wait() -> None:
    """Have writes of this process fail at once on a full disk, because others wait for the process."""
    global PATIENCE_S
    PATIENCE_S = 0.0


def is_full(error: BaseException) -> bool:
    """Return whether an error says that there is no room on a disk."""
    return isinstance(error, OSError) and error.errno in FULL


def system_error(error: Exception, path: str) -> OSError | None:
    """Return the error of the system that a library in Rust names by its number, in the text of an exception."""
    _, found, number = str(error).rpartition("(os error ")
    number = number.removesuffix(")")
    return OSError(int(number), str(error), path) if found and number.isdecimal() else None


def wait_for_room(error: OSError, since: float) -> float:
    """Wait a moment after a failed attempt to write; returns when the first failed, in seconds of `time.monotonic`.

    `since` is that time; 0: this attempt is the first. Raises the error if it is not that the disk is full, and if
    it has been that for `PATIENCE_S`.
    """
    now = time.monotonic()
    first = since or now
    if not is_full(error) or now - first >= PATIENCE_S:
        raise error
    if not since:
        LOG.error("%s; hone tries again for %g s", error, PATIENCE_S)
    time.sleep(PAUSE_S)
    return first


def until_room(write: Callable[[], R]) -> R:
    """Call `write`, which writes a whole file each time, until the disk has room for it; see `wait_for_room`."""
    since = 0.0
    while True:
        try:
            return write()
        except OSError as error:
            since = wait_for_room(error, since)


__all__ = ["PATIENCE_S", "PAUSE_S", "do_not_wait", "is_full", "system_error", "until_room", "wait_for_room"]
