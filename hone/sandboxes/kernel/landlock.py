"""Landlock by system calls: which files a process and its children may still use.

The kernel's interface: https://docs.kernel.org/userspace-api/landlock.html. Version 3 (Linux 6.2) is the oldest that
stops a program from cutting files outside its folder; 6 (Linux 6.12) adds signals and abstract sockets.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Sequence
from contextlib import suppress

OLDEST, WITH_DEVICES, WITH_SCOPES = 3, 5, 6

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_VERSION_FLAG = 1
_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_ALL_FILES = (1 << 15) - 1  # version 3: everything up to TRUNCATE
_TRUNCATE, _IOCTL_DEVICE = 1 << 14, 1 << 15
_BIND_AND_CONNECT = 3  # TCP, since version 4
_ABSTRACT_SOCKETS_AND_SIGNALS = 3

_libc = ctypes.CDLL(None, use_errno=True)


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scopes", ctypes.c_uint64))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


_newest = [1 << 30]


def version() -> int:
    """The kernel's version of Landlock, at most that of `use_at_most`; 0 if it has none or it is off."""
    with suppress(OSError):
        found = _call(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION_FLAG))
        return min(found, _newest[0])
    return 0


def use_at_most(newest: int) -> None:
    """Confine as on a kernel with this version of Landlock, to try what an older one keeps out."""
    _newest[0] = newest


def ruleset(readable: Sequence[str], writable: Sequence[str], devices: Sequence[str], *, network: bool) -> int:
    """A descriptor of rules: read and execute below `readable`, everything below `writable`. Raises OSError.

    Paths that do not exist are left out.
    """
    known = version()
    files = _ALL_FILES | (_IOCTL_DEVICE if known >= WITH_DEVICES else 0)
    scopes = _ABSTRACT_SOCKETS_AND_SIGNALS if known >= WITH_SCOPES else 0
    tcp = _BIND_AND_CONNECT if known >= 4 and not network else 0
    given = _Ruleset(files, tcp, scopes)
    size = ctypes.sizeof(given) if scopes else (16 if known >= 4 else 8)
    rules = _call(_CREATE_RULESET, ctypes.byref(given), ctypes.c_size_t(size), ctypes.c_uint32(0))
    for paths, allowed in (
        (readable, _EXECUTE | _READ_FILE | _READ_DIR),
        (writable, files),
        (devices, _READ_FILE | _WRITE_FILE | _TRUNCATE),
    ):
        for path in paths:
            _allow(rules, path, allowed)
    return rules


def _allow(rules: int, path: str, allowed: int) -> None:
    try:
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(beneath).st_mode):
            allowed &= _EXECUTE | _READ_FILE | _WRITE_FILE | _TRUNCATE  # the others are rights of folders
        rule = _Beneath(allowed, beneath)
        _call(_ADD_RULE, ctypes.c_int(rules), ctypes.c_int(_PATH_BENEATH), ctypes.byref(rule), ctypes.c_uint32(0))
    finally:
        os.close(beneath)


def restrict(rules: int) -> None:
    """Apply the rules to this process, for good; it must have `no_new_privs`. Raises OSError."""
    _call(_RESTRICT_SELF, ctypes.c_int(rules), ctypes.c_uint32(0))


def _call(number: int, *arguments: object) -> int:
    done = int(_libc.syscall(ctypes.c_long(number), *arguments))
    if done < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"Landlock (system call {number}): {os.strerror(error)}")
    return done


__all__ = ["OLDEST", "WITH_SCOPES", "restrict", "ruleset", "use_at_most", "version"]
