"""Working folders of a fixed size: a tmpfs each, in a mount namespace of the warm parent's own.

What a program puts there is bounded by the kernel, however it does that: files without a name, files in flight between
sockets, paths that nobody can walk, space that is only reserved. The namespace ends with the warm parent, and all its
mounts with it. An ordinary user needs a user namespace for that, which some systems refuse: then sizes are counted.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_NEW_MOUNTS, _NEW_USER = 0x20000, 0x10000000  # CLONE_NEWNS, CLONE_NEWUSER
_NO_SUID, _NO_DEVICES, _BIND, _RECURSIVE, _PRIVATE, _DETACH = 2, 4, 0x1000, 0x4000, 1 << 18, 2
ZEROS = "/dev/full"  # in place of /dev/zero: it reads as zeros too, and cannot be mapped as memory that nobody counts
SPARE = 1 << 20  # bytes beyond the limit, so that a program that fills its folder is seen to exceed it

_libc = ctypes.CDLL(None, use_errno=True)


def own_mounts() -> str:
    """Give this process, which has one thread, a mount namespace of its own. Returns why not, or an empty text."""
    user, group = os.geteuid(), os.getegid()
    try:
        _checked("unshare", _libc.unshare(_NEW_MOUNTS if user == 0 else _NEW_MOUNTS | _NEW_USER))
        if user:
            Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")
        _checked("mount", _libc.mount(None, b"/", None, ctypes.c_ulong(_RECURSIVE | _PRIVATE), None))
        _checked("mount", _libc.mount(ZEROS.encode(), b"/dev/zero", None, ctypes.c_ulong(_BIND), None))
    except OSError as error:
        return str(error)
    return ""


def mount_folder(folder: str, most_bytes: int, most_files: int, owner: tuple[int, int]) -> None:
    """Mount an empty file system on a folder, for a user and a group. Raises OSError."""
    options = f"size={most_bytes + SPARE},nr_inodes={most_files},mode=0700,uid={owner[0]},gid={owner[1]}"
    flags = ctypes.c_ulong(_NO_SUID | _NO_DEVICES)
    _checked("mount", _libc.mount(b"hone", os.fsencode(folder), b"tmpfs", flags, options.encode()))


def unmount(folder: str) -> None:
    """Forget a folder's file system and all that is in it. Raises OSError."""
    _checked("umount2", _libc.umount2(os.fsencode(folder), _DETACH))


def _checked(name: str, done: int) -> None:
    if done != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


__all__ = ["SPARE", "ZEROS", "mount_folder", "own_mounts", "unmount"]
