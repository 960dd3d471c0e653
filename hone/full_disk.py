"""A full disk: whoever writes the record of a run tries again for a while, because somebody may make room.

    until_room(lambda: path.write_text(text))     a file that is written as a whole

    attempt = 0                                   a file that grows
    while rest:
        try:
            rest = rest[os.write(file, rest) :]
        except OSError as error:
            attempt = wait_for_room(error, attempt)

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


def is_full(error: BaseException) -> bool:
    """Return whether an error says that there is no room on a disk."""
    return isinstance(error, OSError) and error.errno in FULL


def wait_for_room(error: OSError, attempt: int) -> int:
    """Wait a moment after attempt number `attempt` (from 0) to write; returns the next attempt's number.

    Raises the error if it is not that the disk is full, and if it has been that for `PATIENCE_S`.
    """
    if not is_full(error) or attempt * PAUSE_S >= PATIENCE_S:
        raise error
    if attempt == 0:
        LOG.error("%s; hone tries again for %g s", error, PATIENCE_S)
    time.sleep(PAUSE_S)
    return attempt + 1


def until_room(write: Callable[[], R]) -> R:
    """Call `write`, which writes a whole file each time, until the disk has room for it; see `wait_for_room`."""
    attempt = 0
    while True:
        try:
            return write()
        except OSError as error:
            attempt = wait_for_room(error, attempt)


__all__ = ["PATIENCE_S", "PAUSE_S", "is_full", "until_room", "wait_for_room"]
