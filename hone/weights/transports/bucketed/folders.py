"""Temporary folders of a sender of weights, which are removed soon after it ends.

    <tmp>/hone-weights-xxxx/        0700
        lock                        flock, exclusive, as long as the sender's process lives (kill -9 included)
        ...

Whoever creates the next folder removes this user's folders whose lock is free. A receiver checks the lock to learn
whether its sender is still alive.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from hone.weights.base import WeightSyncError

PREFIX = "hone-weights-"
LOCK = "lock"
YOUNG_S = 60.0  # a younger folder may not be locked yet
LONGEST_ROOT = 60  # characters; the path of a socket may have about 100


class OwnFolder:
    """A new folder that only this user can access, locked by this process."""

    def __init__(self, parent: Path | None = None) -> None:
        """`parent`: default: the temporary folder, or /tmp if its path is too long for sockets."""
        root = parent or _short_root()
        sweep(root)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
        self._descriptor = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """Remove the folder with everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)


class Subfolder:
    """A folder of this process in another process's `OwnFolder`, which removes it if this process is killed."""

    def __init__(self, parent: Path, name: str) -> None:
        self.path = parent / name
        self.path.mkdir(mode=0o700)

    def close(self) -> None:
        """Remove the folder with everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)


def sweep(root: Path) -> None:
    """Remove the folders in `root` whose processes have ended."""
    for path in root.glob(f"{PREFIX}*"):
        lock = path / LOCK
        with contextlib.suppress(OSError):  # it is another user's, or another process removes it right now
            if lock.stat().st_uid == os.getuid() and time.time() - lock.stat().st_mtime > YOUNG_S and is_free(path):
                shutil.rmtree(path)


def is_free(path: Path) -> bool:
    """Return whether the process that created the folder has ended or removed it."""
    try:
        descriptor = os.open(path / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _short_root() -> Path:
    roots = [Path(tempfile.gettempdir()), Path("/tmp")]
    for root in roots:
        if len(str(root)) <= LONGEST_ROOT and root.is_dir():
            return root
    raise WeightSyncError(f"the path of the temporary folder {roots[0]} is too long for sockets; set TMPDIR")
