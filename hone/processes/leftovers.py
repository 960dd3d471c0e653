"""Remove a folder that a program filled, whatever it left there.

Folders may be nested so deep that recursion, PATH_MAX or the number of open files ends a walk, or closed to their
owner. So every folder is moved up before it is emptied: depth costs nothing. Standard library only.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress


def remove_folder(folder: str) -> None:
    """Remove a folder with all that is in it; what the kernel keeps (a mount, another user's file) stays."""
    with suppress(OSError):  # it is gone, or no folder
        if not os.path.islink(folder):
            os.chmod(folder, 0o700)
        root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            empty_folder(root)
        finally:
            os.close(root)
        os.rmdir(folder)


def empty_folder(root: int) -> None:
    """Remove everything in an open folder."""
    word = secrets.token_hex(8)
    names = (f".{word}-{number}" for number in itertools.count())
    waiting = _emptied(root, root, names)
    while waiting:
        name = waiting.pop()
        with suppress(OSError):
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=root)
            try:
                waiting += _emptied(below, root, names)
            finally:
                os.close(below)
            os.rmdir(name, dir_fd=root)


def _emptied(here: int, root: int, names: Iterator[str]) -> list[str]:
    """Unlink the files of an open folder and move its folders to `root`; returns their names there."""
    moved = []
    with os.scandir(here) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in found:
        with suppress(OSError):
            if not is_folder:
                os.unlink(name, dir_fd=here)
                continue
            os.chmod(name, 0o700, dir_fd=here)  # a folder that is moved must be writable
            place = next(names)
            os.rename(name, place, src_dir_fd=here, dst_dir_fd=root)
            moved.append(place)
    return moved


__all__ = ["empty_folder", "remove_folder"]
