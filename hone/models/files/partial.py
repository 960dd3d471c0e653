"""Files and folders that are written beside their place and then renamed, so that they are whole or absent there.

A lock file says that the process that writes is alive: the kernel releases the lock of a process that is killed, also
on another machine if the file system has locks across machines.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

_LEFT = ".*.partial.lock"


@contextmanager
def partial_of(target: Path) -> Iterator[Path]:
    """A new path beside `target` to write a file or a folder to; the caller renames it, or it is removed at the end.

    What killed processes have left in this way beside `target` is removed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for lock in target.parent.glob(_LEFT):
        with suppress(OSError), alone(lock):  # it is held, or another user's
            _remove(lock.with_suffix(""))
    with ExitStack() as held:
        while True:
            partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
            with suppress(BlockingIOError):  # another process has just taken the lock for one that was left
                held.enter_context(alone(partial.with_name(f"{partial.name}.lock")))
                break
        held.callback(_remove, partial)
        yield partial


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Have the disk itself hold a file, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Hold a lock file: two processes that write one folder would remove each other's files.

    The kernel releases the lock of a process that is killed. Raises BlockingIOError if another process holds it.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with lock.open("a", encoding="utf-8") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_current = os.path.samestat(os.fstat(held.fileno()), lock.stat())
            except BlockingIOError as error:
                raise BlockingIOError(error.errno, "another process is writing it", str(lock)) from error
            except FileNotFoundError:
                is_current = False
            if not is_current:  # its last holder removed it after it was opened here
                continue
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
            return


__all__ = ["alone", "partial_of"]
