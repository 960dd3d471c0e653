"""Weights between processes on one machine: buckets in shared memory, announced over ZeroMQ.

It uses GPU memory if every receiver can access the sender's GPU and the platform can share it, else host memory. All
receivers read the same buckets, so more receivers cost the sender nothing. The sockets are in a folder that only this
user can access. `bucketed.py` has a picture of a sync, and `by_rank.py` one with several senders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from socket import socket
from typing import Any

import torch
from torch import Tensor

from hone.models.parts.boxes import BoxError, BoxMap, contains, from_text
from hone.platforms.base import current_platform
from hone.weights.base import Offer, WeightReceiver, WeightSyncError
from hone.weights.transports.bucketed.buckets import Filled
from hone.weights.transports.bucketed.channel import ReceiverChannel, SenderChannel
from hone.weights.transports.bucketed.folders import OwnFolder, Subfolder
from hone.weights.transports.bucketed.sync import COUNT, BucketedEngine, BucketedReceiver
from hone.weights.transports.bucketed.wire import BrokenMessage, Message, expect, rank_token
from hone.weights.transports.ipc.memory import (
    Buffers,
    DeviceBuffers,
    MemoryListener,
    SharedBuffers,
    connect,
    mapped,
    open_buffers,
)

PART = 16 << 20  # bytes per part in host memory; receivers read one part while the next is written
LARGEST_WANTS = 3 << 18  # bytes of text; who wants more than fits into one message gets whole tensors
ENOUGH = 32 << 20  # bytes after which the next bucket begins; two of this size stay in the processor's cache


class IpcEngine(BucketedEngine):
    """Servers on the same machine map the trainer's buckets, in shared memory or in the memory of its GPU."""

    transport = "ipc"

    def __init__(self, bucket_bytes: int, timeout_s: float, token: str) -> None:
        super().__init__(bucket_bytes, timeout_s, token)
        self._buffers: Buffers | None = None
        self._folder: OwnFolder | Subfolder | None = None
        self._listener: MemoryListener | None = None
        self._boxes = ""  # of the tensors that are not sent whole, as text

    async def finalize(self) -> None:
        """Keep the buckets: allocating and mapping them again would cost a page fault per 4 KiB."""
        listener, self._listener = self._listener, None
        folder, self._folder = self._folder, None
        try:
            if listener is not None:
                await listener.close()
        finally:
            await super().finalize()
            if folder is not None:
                folder.close()

    async def close(self) -> None:
        await self.finalize()
        if self._buffers is not None:
            self._buffers.close()
            self._buffers = None

    @classmethod
    def receiver(cls, offer: Offer, rank: int, token: str) -> WeightReceiver:
        return IpcReceiver(offer, rank, token)

    def _open(self, channel: SenderChannel) -> Mapping[str, Any]:
        self._folder = self._make_folder()
        memory = str(self._folder.path / "memory")
        self._listener = MemoryListener(memory, self._opened, self._gone)
        return {"memory": memory, "channel": channel.bind(f"ipc://{self._folder.path}/channel")}

    async def _share(self, channel: SenderChannel) -> None:
        self._choose_buffers(channel)
        for peer in channel.left():
            ticket = self._listener.ticket(peer.name) if self._listener is not None else ""
            buffers = self._opened()
            described = buffers.describe(is_mapped=buffers.identity in peer.facts.get("mapped", ()))
            message = {"type": "memory", **described, "ticket": ticket, "boxes": self._boxes}
            await channel.send(message, to=peer)

    def _bucket(self, number: int) -> Tensor:
        return self._opened().tensors[number % COUNT]

    def _allocate(self, number: int, begin: int) -> None:
        self._opened().allocate(number % COUNT, begin + 2 * PART)  # a part ends with the tensors that reach `PART`

    def _portions(self) -> tuple[int, int]:
        on_device = self._bucket(0).device.type != "cpu"
        return super()._portions() if on_device else (min(self.bucket_bytes, PART), ENOUGH)

    async def _ship(self, number: int, filled: Filled, last: bool) -> None:
        self._opened().synchronize()
        await self.channel.send({"type": "bucket", "number": number, "groups": filled.groups, "last": last})

    def _opened(self) -> Buffers:
        if self._buffers is None:
            raise WeightSyncError("no receiver is connected yet, so there are no buckets")
        return self._buffers

    def _make_folder(self) -> OwnFolder | Subfolder:
        return OwnFolder()

    def _choose_buffers(self, channel: SenderChannel) -> None:
        """Choose device memory if all receivers can access it. Reuse the last sync's buckets if they fit."""
        kind: type[Buffers] = DeviceBuffers if self._reaches(channel) else SharedBuffers
        if not isinstance(self._buffers, kind):
            if self._buffers is not None:
                self._buffers.close()
            self._buffers = kind(self.bucket_bytes)

    def _reaches(self, channel: SenderChannel) -> bool:
        """Return whether every receiver can open memory of this process's device."""
        own = own_device()
        return shares_memory() and all(own in peer.facts.get("devices", ()) for peer in channel.left())

    def _gone(self, name: str) -> None:
        if self._channel is not None:
            self._channel.gone(name)


def own_device() -> str:
    """The name of this process's current device, equal in every process of the machine; empty if it has none."""
    devices = current_platform().device_uuids()
    index = torch.accelerator.current_device_index() if torch.accelerator.is_available() else 0
    return devices[index] if devices else ""


def shares_memory() -> bool:
    """Return whether another process can open this process's device memory."""
    platform = current_platform()
    return platform.supports_ipc and not platform.why_no_ipc()


class IpcReceiver(BucketedReceiver):
    """A rank's side."""

    def __init__(self, offer: Offer, rank: int, token: str) -> None:
        super().__init__(offer, rank, token)
        self._buckets: list[Tensor] = []

    def init_process_group(self) -> None:
        connection, message = self._meet(self.offer.address)
        if message["type"] == "sender":
            expect(message, address=dict)
            connection, message = self._meet_rank(message["address"])
        if message["type"] != "memory":
            raise BrokenMessage(f"a {message['type'][:40]} message came where memory was due")
        self._buckets = open_buffers(message, connection)
        self.boxes = self._agreed(message)
        self._channel.send({"type": "ready"})

    def _meet(self, address: Mapping[str, Any]) -> tuple[socket, Message]:
        """Connect to a sender; return the connection that ends with it, and its first message."""
        expect({"type": "address", **address}, session=str, memory=str, channel=str)
        connection = connect(address["memory"], self._channel.name, self._channel.remaining_s())
        self._channel.watch(connection)
        facts = {
            "devices": current_platform().device_uuids(),
            "device": own_device(),
            "holds": self.holds,
            "mapped": mapped(),
            "wants": self.wants if len(self.wants) <= LARGEST_WANTS else "",
        }
        self._channel.connect(address["channel"], address["session"], facts)
        return connection, self._channel.receive("open its memory for")

    def _agreed(self, message: Message) -> BoxMap:
        """The boxes that will come. Raises BrokenMessage for boxes that this process did not ask for."""
        expect(message, boxes=str)
        try:
            boxes, wanted = from_text(message["boxes"]), from_text(self.wants)
        except BoxError as error:
            raise BrokenMessage(str(error)) from error
        for name, (shape, box) in boxes.items():
            if name not in wanted or wanted[name].shape != shape or not contains(box, wanted[name].box):
                raise BrokenMessage(f"the sender sends {list(box)} of {name!r} {list(shape)}, where another was needed")
        return boxes

    def _meet_rank(self, address: Mapping[str, Any]) -> tuple[socket, Message]:
        """Leave the driver's channel for that of the training rank that sends to this process."""
        rest = replace(self.offer, timeout_s=self._channel.remaining_s())
        self._channel.close({"type": "done"})
        self._channel = ReceiverChannel(rest, self.rank, rank_token(self._token))
        return self._meet(address)

    def _device(self) -> torch.device:
        return self._buckets[0].device

    def _bucket(self, message: Mapping[str, Any]) -> Tensor:
        number: int = message["number"]
        return self._buckets[number % COUNT]

    def _release(self) -> None:
        if self._buckets[0].device.type != "cpu":
            torch.accelerator.synchronize(self._buckets[0].device)
