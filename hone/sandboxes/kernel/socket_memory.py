"""The memory that Unix sockets hold for what was sent and not read, which is in no process's figures.

Asked of the kernel by `sock_diag(7)`; see `unix_diag.h` and `sock_diag.h` in its sources.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

_NETLINK_SOCK_DIAG, _BY_FAMILY, _REQUEST_DUMP = 4, 20, 0x301
_ALL_STATES, _SHOW_MEMORY_AND_USER = 0xFFFFFFFF, 0x60
_ERROR, _DONE = 2, 3
_MEMORY, _USER = 5, 7  # attributes
_SENT = 2  # place of SK_MEMINFO_WMEM_ALLOC: what a Unix socket has sent counts there until it is read
_HEADER = struct.Struct("=IHHII")
_ASK_S = 1.0
USUAL_BUFFER, ONE_SEND = 212_992, 1 << 16  # bytes


def socket_bytes(user: int, pids: Sequence[int], *, apart: bool) -> int:
    """Bytes in all Unix sockets of a user, or of processes where `user` is -1; 0 on kernels that cannot say.

    A user's sockets are counted while they are in flight between processes, too. Sockets in flight are held by others.
    `apart`: the processes have a network namespace of their own, whose sockets cannot be listed here. Then each of them
    counts as full.
    """
    inodes = {inode for pid in pids for inode in _sockets_of(pid)}
    if not inodes:
        return 0
    if apart:
        return len(inodes) * _most_in_one()
    with suppress(OSError, struct.error):
        return sum(sent for inode, owner, sent in _listed() if (owner == user if user >= 0 else inode in inodes))
    return 0


def _most_in_one() -> int:
    """Bytes that one socket can hold: a send is allowed while less than twice the largest buffer is taken."""
    buffer = USUAL_BUFFER
    with suppress(OSError):
        buffer = int(Path("/proc/sys/net/core/wmem_max").read_text(encoding="ascii"))
    return 2 * buffer + ONE_SEND


def _sockets_of(pid: int) -> Iterator[int]:
    """Inodes of the sockets that a process has open."""
    with suppress(OSError):
        for one in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                kind, _, inode = os.readlink(one).partition(":")
                if kind == "socket":
                    yield int(inode[1:-1])


def _listed() -> Iterator[tuple[int, int, int]]:
    """(inode, user, bytes) of each Unix socket of this network namespace. Raises OSError."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as asking:
        asking.settimeout(_ASK_S)
        body = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, _ALL_STATES, 0, _SHOW_MEMORY_AND_USER, 0, 0)
        asking.send(_HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _REQUEST_DUMP, 1, 0) + body)
        while True:
            data, at = asking.recv(1 << 16), 0
            while at < len(data):
                length, kind = struct.unpack_from("=IH", data, at)
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    raise OSError(-struct.unpack_from("=i", data, at + _HEADER.size)[0], "sock_diag")
                yield _described(data[at + _HEADER.size : at + length])
                at += _aligned(length)


def _described(message: bytes) -> tuple[int, int, int]:
    """Inode, user and bytes in a `unix_diag_msg` with its attributes."""
    inode, user, sent, at = struct.unpack_from("=I", message, 4)[0], -1, 0, 16
    while at + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, at)
        if kind == _MEMORY:
            sent = struct.unpack_from("=9I", message, at + 4)[_SENT]
        elif kind == _USER:
            user = struct.unpack_from("=I", message, at + 4)[0]
        at += max(4, _aligned(length))
    return inode, user, sent


def _aligned(length: int) -> int:
    return (length + 3) & ~3


__all__ = ["socket_bytes"]
