"""Memory shared by processes on one machine, for the buckets of `ipc`.

    sender                                            receiver
      SharedBuffers: anonymous memory, two buckets      open_buffers
        MemoryListener: unix socket in a 0700 folder <-- connects, shows its ticket; gets the descriptors, maps them
                                                         and keeps the connection: its end is the other side's end

The memory has no name (Linux: memfd; elsewhere a file that is unlinked before use), so nothing is left behind when a
process is killed: the kernel frees it with the last process that maps it. It does not count towards the size of
/dev/shm, which containers limit to 64 MiB. Descriptors are sent by SCM_RIGHTS, and only to a receiver that got a ticket
over the authenticated control channel. The sender's mapping is page-locked if its weights are on a device, so that
they are copied without a stage between. A receiver keeps its mapping for the next sync, because mapping costs a page
fault per 4 KiB.

On an accelerator that can share its memory the buckets are device memory, and the receiver opens the platform's
handles (`DeviceBuffers`).
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hone.platforms.base import current_platform
from hone.platforms.cpu import CpuPlatform
from hone.weights.base import WeightSyncError
from hone.weights.transports.bucketed.channel import GOODBYE
from hone.weights.transports.bucketed.sync import COUNT
from hone.weights.transports.bucketed.wire import BrokenMessage, expect

TICKET_BYTES = 16


class SharedBuffers:
    """The sender's two buckets in anonymous shared memory, allocated as far as they are written.

    Beside an accelerator they are allocated whole, because they may be page-locked.
    """

    kind = "memory"

    def __init__(self, size: int) -> None:
        """`size`: bytes of one bucket. Raises WeightSyncError if the machine cannot give the memory."""
        free = CpuPlatform().memory().free
        if COUNT * size > free:  # the kernel would kill processes before it refuses
            raise WeightSyncError(
                f"no memory for {COUNT} buckets of {size} bytes, {free} are free; choose a smaller weights.bucket_mib"
            )
        self.size = size
        self.identity = secrets.token_hex(8)
        self.descriptors = [_anonymous(size) for _ in range(COUNT)]
        self._allocated = [0] * COUNT  # bytes of each
        self.tensors = [_mapped(descriptor, size) for descriptor in self.descriptors]
        if torch.accelerator.is_available():
            for number in range(COUNT):
                self.allocate(number, size)
        self._pinned = [tensor for tensor in self.tensors if current_platform().pin(tensor)]

    def allocate(self, number: int, end: int) -> None:
        """Allocate the first `end` bytes of a bucket. Raises WeightSyncError if the machine cannot give it."""
        begin, end = self._allocated[number], min(end, self.size)
        if end <= begin or not hasattr(os, "posix_fallocate"):
            return
        try:
            # Without it, a copy that finds no memory ends the process with a bus error.
            os.posix_fallocate(self.descriptors[number], begin, end - begin)
        except OSError as error:
            raise _no_memory(end, error) from error
        self._allocated[number] = end

    def describe(self, is_mapped: bool) -> dict[str, Any]:
        """Return the facts with which a receiver opens the buckets; `is_mapped`: it has, in an earlier sync."""
        return {"kind": self.kind, "identity": self.identity, "size": self.size}

    def synchronize(self) -> None:
        """Nothing to wait for: host memory is written synchronously."""

    def close(self) -> None:
        for tensor in self._pinned:
            current_platform().unpin(tensor)
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors, self.tensors, self._pinned = [], [], []


class DeviceBuffers:
    """The sender's two buckets in the memory of its device, for receivers that can access the same device."""

    kind = "device"
    descriptors: tuple[int, ...] = ()

    def __init__(self, size: int) -> None:
        self.size = size
        self.identity = secrets.token_hex(8)
        index = torch.accelerator.current_device_index()
        self.device = current_platform().torch_device(index)
        self.uuid = current_platform().device_uuids()[index]
        self.tensors = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(COUNT)]

    def describe(self, is_mapped: bool) -> dict[str, Any]:
        """Handles for one receiver, unless it has opened its own in an earlier sync.

        torch counts each handle as a user of the memory until its receiver releases it. A handle that nobody opens is
        never released: then the memory stays allocated for the life of this process (torch/csrc/CudaIPCTypes.cpp).
        """
        handles = [] if is_mapped else [_handle(tensor) for tensor in self.tensors]
        return {"kind": self.kind, "identity": self.identity, "size": self.size, "uuid": self.uuid, "handles": handles}

    def allocate(self, number: int, end: int) -> None:
        """Nothing to do: device memory is allocated at once."""

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    def close(self) -> None:
        self.tensors = []


Buffers = SharedBuffers | DeviceBuffers


def _anonymous(size: int) -> int:
    """A descriptor of `size` bytes of anonymous memory, none of them allocated yet."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("hone-weights", os.MFD_CLOEXEC)
    else:
        descriptor, path = tempfile.mkstemp(prefix="hone-weights-")
        os.unlink(path)
    try:
        os.ftruncate(descriptor, size)
    except OSError as error:
        os.close(descriptor)
        raise _no_memory(size, error) from error
    return descriptor


def _no_memory(size: int, error: OSError) -> WeightSyncError:
    return WeightSyncError(
        f"no shared memory for a bucket of {size} bytes ({error.strerror}); choose a smaller weights.bucket_mib"
    )


def _mapped(descriptor: int, size: int) -> Tensor:
    """[size] uint8 over the memory of a descriptor, which may be closed afterwards."""
    return torch.frombuffer(mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED), dtype=torch.uint8)


def _handle(tensor: Tensor) -> list[Any]:
    """The platform's description of a storage for another process, as JSON: bytes are written in hexadecimal."""
    return [{"hex": part.hex()} if isinstance(part, bytes) else part for part in current_platform().share(tensor)]


# ---------------------------------------------------------------------------------------------------- the sender


class MemoryListener:
    """Sends the descriptors to a receiver with a valid ticket, and notices when its process ends."""

    def __init__(self, path: str, buffers: Callable[[], Buffers], gone: Callable[[str], None]) -> None:
        """`gone` is called with the name of a receiver whose connection ended unexpectedly."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.bind(path)
        self._socket.listen(128)
        self._buffers = buffers
        self._gone = gone
        self._tickets: dict[bytes, str] = {}
        self._tasks = {asyncio.create_task(self._accept(), name="weight memory: listener")}

    def ticket(self, name: str) -> str:
        """A random hexadecimal ticket, valid once."""
        ticket = secrets.token_bytes(TICKET_BYTES)
        self._tickets[ticket] = name
        return ticket.hex()

    async def close(self) -> None:
        try:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:  # also if the run ends here
            self._socket.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(self._socket)
            task = asyncio.create_task(self._serve(connection), name="weight memory: connection")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with connection, contextlib.suppress(OSError):
            connection.setblocking(False)
            ticket = b""
            while len(ticket) < TICKET_BYTES:
                more = await loop.sock_recv(connection, TICKET_BYTES - len(ticket))
                if not more:
                    return
                ticket += more
            name = self._tickets.pop(ticket, "")  # 128 random bits, used once, so no timing attack
            if not name:
                return
            socket.send_fds(connection, [b"m"], list(self._buffers().descriptors))
            said = b""
            with contextlib.suppress(OSError):  # connection reset: the process was killed
                said = await loop.sock_recv(connection, len(GOODBYE))
            if said != GOODBYE:
                self._gone(name)


# -------------------------------------------------------------------------------------------------- the receiver

_kept: dict[str, list[Tensor]] = {}  # identity -> buckets; only of the last sender


def mapped() -> list[str]:
    """The identities of the buckets that this process has mapped."""
    return list(_kept)


def connect(path: str, who: str, timeout_s: float) -> socket.socket:
    """Connect to the sender; the connection closes when it ends. Raises WeightSyncError if nobody listens."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        connection.connect(path)
    except OSError as error:
        connection.close()
        raise WeightSyncError(f"{who}: no sender of weights at {path} ({error})") from error
    return connection


def open_buffers(message: Mapping[str, Any], connection: socket.socket) -> list[Tensor]:
    """Map the sender's buckets into this process. Raises WeightSyncError if that fails."""
    expect(dict(message), kind=str, identity=str, size=int, ticket=str)
    try:
        ticket = bytes.fromhex(message["ticket"])
    except ValueError as error:
        raise BrokenMessage(f"a memory message whose ticket is {message['ticket']!r:.100}") from error
    try:
        connection.sendall(ticket)
        _, descriptors, _, _ = socket.recv_fds(connection, 1, COUNT)
    except OSError as error:
        raise WeightSyncError(f"the sender disconnected before it sent its memory ({error})") from error
    try:
        if message["identity"] not in _kept:
            _kept.clear()
            _kept[message["identity"]] = _opened(message, descriptors)
        return _kept[message["identity"]]
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise BrokenMessage(f"the sender described its memory wrongly: {error!r:.200}") from error
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _opened(message: Mapping[str, Any], descriptors: list[int]) -> list[Tensor]:
    if message["kind"] == DeviceBuffers.kind:
        if len(message["handles"]) != COUNT:
            raise BrokenMessage(f"{len(message['handles'])} handles of device memory came, expected {COUNT}")
        index = current_platform().device_uuids().index(message["uuid"])
        return [_from_handle(handle, index) for handle in message["handles"]]
    if message["kind"] != SharedBuffers.kind or len(descriptors) != COUNT:
        raise BrokenMessage(f"{len(descriptors)} buckets of kind {message['kind'][:40]!r} came, expected {COUNT}")
    for descriptor in descriptors:
        if os.fstat(descriptor).st_size < message["size"]:
            raise BrokenMessage(f"a bucket of {message['size']} bytes has {os.fstat(descriptor).st_size}")
    return [_mapped(descriptor, message["size"]) for descriptor in descriptors]


def _from_handle(handle: list[Any], index: int) -> Tensor:
    parts = [bytes.fromhex(part["hex"]) if isinstance(part, dict) else part for part in handle]
    return current_platform().open_shared(index, parts)
