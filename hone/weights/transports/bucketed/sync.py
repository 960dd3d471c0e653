"""The common part of `ipc`, `collective` and others: buckets, announced and acknowledged over a control channel.

    sender   fill 0 | fill 1 | wait taken 0, fill 2 | wait taken 1, fill 3 | ... | end, wait done
    receiver          read 0 | read 1               | read 2               |     | read, done
                               (two buffers: bucket 2 overwrites bucket 0 while bucket 1 is read)

A bucket may be announced in parts, so that receivers read one part while the sender writes the next.

A transport defines where the buffers are on each side and how a bucket gets across; everything else is here.
"""

from __future__ import annotations

import contextlib
import secrets
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hone.weights.base import (
    Arrival,
    CheckpointEngine,
    Intake,
    NamedTensors,
    Offer,
    Payload,
    Sent,
    WeightReceiver,
    WeightSyncError,
)
from hone.weights.digests.digest import Method, method_for
from hone.weights.digests.packed import ROW
from hone.weights.transports.bucketed.buckets import Filled, Packer, Unpacker
from hone.weights.transports.bucketed.channel import ReceiverChannel, SenderChannel
from hone.weights.transports.bucketed.wire import BrokenMessage, expect

COUNT = 2  # buffers: one is written while the other is read


class BucketedEngine(CheckpointEngine):
    """The trainer's side."""

    def __init__(self, bucket_bytes: int, timeout_s: float, token: str) -> None:
        super().__init__(max(bucket_bytes // ROW, 1) * ROW, timeout_s, token)
        self._receivers: Sequence[tuple[str, int]] = ()  # replica and rank of each
        self._channel: SenderChannel | None = None

    def build_topology(self, ranks: Mapping[str, int]) -> None:
        self._receivers = [(replica, rank) for replica, count in ranks.items() for rank in range(count)]

    def prepare(self, version: int, payload: Payload) -> Offer:
        """Must be called on the event loop that sends."""
        self._channel = SenderChannel(secrets.token_hex(8), version, self._receivers, self._token, self.timeout_s)
        address = {"session": self._channel.session, **self._open(self._channel)}
        return Offer(self.transport, version, payload, self.timeout_s, address)

    async def init_process_group(self) -> None:
        await self.channel.meet()
        await self._share(self.channel)
        await self.channel.until(lambda peer: peer.ready, "be ready for")

    async def send_weights(self, weights: NamedTensors, version: int) -> Sent:
        part, full = self._portions()
        packer = Packer(weights, method_for(self._bucket(0).device), part)
        number = 0
        try:
            while await self._fill(packer, number, full):
                number += 1
        except BaseException as error:
            await self.channel.send({"type": "abort", "reason": f"{type(error).__name__}: {error}"})
            raise
        packer.label(self._label())
        digest = packer.hexdigest()
        await self.channel.send({"type": "end", "tensors": packer.tensors, "bytes": packer.bytes, "digest": digest})
        await self.channel.until(lambda peer: peer.done, "take in all of")
        return Sent(version, digest, packer.tensors, packer.bytes, number, self.channel.lost())

    def _label(self) -> str:
        """Return the text that the digest covers besides the tensors, once they are sent."""
        return ""

    async def _fill(self, packer: Packer, number: int, full: int) -> bool:
        """Send bucket `number` part by part; return whether any tensor was left for it."""
        before = number - COUNT
        await self.channel.until(lambda peer: peer.taken >= before, f"take bucket {before} of")
        bucket, used, begun = self._bucket(number), 0, False
        while True:
            self._allocate(number, used)
            filled = await packer.fill(bucket, used)
            if not (filled.groups or begun):
                return False
            used, begun = filled.used, True
            last = not filled.groups or used == bucket.numel() or (used >= full and not packer.midway)
            await self._ship(number, filled, last)
            if last:
                return True

    def drop(self, replica: str, reason: str) -> None:
        if self._channel is not None:
            self._channel.drop(replica, reason)

    async def finalize(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    @property
    def channel(self) -> SenderChannel:
        """The channel of the current sync."""
        if self._channel is None:
            raise WeightSyncError("the sync has not been prepared")
        return self._channel

    @abstractmethod
    def _open(self, channel: SenderChannel) -> Mapping[str, Any]:
        """Listen; return what receivers need besides the session, with the control channel's address as `channel`."""

    @abstractmethod
    async def _share(self, channel: SenderChannel) -> None:
        """Called when all receivers are connected: tell each how to access the buckets, and wait until it is ready."""

    @abstractmethod
    def _bucket(self, number: int) -> Tensor:
        """The buffer of bucket `number`: [bucket_bytes] uint8."""

    def _allocate(self, number: int, begin: int) -> None:
        """Called before the next part of bucket `number` is written, from byte `begin`, so that it has memory."""

    def _portions(self) -> tuple[int, int]:
        """Bytes per announced part, and bytes after which the next bucket begins."""
        return self.bucket_bytes, 0

    @abstractmethod
    async def _ship(self, number: int, filled: Filled, last: bool) -> None:
        """Announce bucket `number` to the remaining receivers, and send it."""


class BucketedReceiver(WeightReceiver):
    """A rank's side."""

    def __init__(self, offer: Offer, rank: int, token: str) -> None:
        super().__init__(offer, rank, token)
        self._channel = ReceiverChannel(offer, rank, token)

    @property
    def method(self) -> Method:
        return method_for(self._device())

    def stream(self, intake: Intake) -> Iterator[Arrival]:
        unpacker = Unpacker(intake)
        due = 0
        while True:
            message = self._channel.receive(f"send bucket {due} of")
            if message["type"] == "end":
                expect(message, tensors=int, bytes=int, digest=str)
                unpacker.finish(message["tensors"], message["bytes"])
                self.expected = message["digest"]
                return
            expect(message, number=int, groups=list, last=bool)
            if message["type"] != "bucket" or message["number"] != due:
                raise BrokenMessage(f"{message['type'][:40]} {message['number']} came where bucket {due} was due")
            yield from unpacker.read(self._bucket(message), message["groups"])
            if message["last"]:
                self._release()
                self._channel.send({"type": "taken", "bucket": due})
                due += 1

    def finalize(self, failure: str = "", digest: str = "") -> None:
        with contextlib.suppress(OSError):
            self._channel.close({"type": "failed", "reason": failure} if failure else {"type": "done"})

    @abstractmethod
    def _device(self) -> torch.device:
        """The device of the buckets; known after connecting."""

    @abstractmethod
    def _bucket(self, message: Mapping[str, Any]) -> Tensor:
        """Wait for the announced bucket and return its buffer: [bytes] uint8."""

    def _release(self) -> None:
        """Wait until the device has finished reading this bucket; a CPU has nothing queued."""
