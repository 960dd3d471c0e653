"""A full disk: whoever writes the record of a run tries again for a while, because somebody may make room.

attempt = 0
while rest:
    try:
        rest = rest[os.write(file, rest) :]
    except OSError as error:
        attempt = wait_for_room(error, attempt)
"""

from __future__ import annotations

import errno
import logging
import time

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


__all__ = ["PATIENCE_S", "PAUSE_S", "is_full", "wait_for_room"]
