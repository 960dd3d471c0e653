"""The sender of one training rank, for the receivers that `by_rank` assigns to it.

    driver (by_rank)                  every rank (collectively)                    its receivers
      order(Locate)      -->            where am I, which device have I
      order(OpenSender)  -->            open the sockets of an `IpcEngine`    <--    connect
      order(SendStream)  -->            gather tensor by tensor --> buckets   -->    read them where they are
      drop (ZeroMQ)      -->            stop waiting for a receiver

A rank without receivers, or whose receivers are all lost, gathers to the end too, because gathering is a collective.
The sockets are in the driver's folder, so they go with it when a rank is killed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from socket import gethostname
from typing import Any

import zmq
import zmq.asyncio

from hone.models.parts.boxes import Boxed, BoxMap, from_text, to_text
from hone.models.parts.views import Viewed
from hone.weights.base import Full, NamedTensor, NamedTensors, Sent
from hone.weights.transports.bucketed.channel import LARGEST_ANSWER, SenderChannel
from hone.weights.transports.bucketed.folders import OwnFolder, Subfolder, is_free
from hone.weights.transports.bucketed.wire import BrokenMessage, decode, expect, lock
from hone.weights.transports.ipc.engine import IpcEngine, own_device, shares_memory

BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Locate:
    """Answer with a `RankLocation`, as a dict."""

    machine: str  # the driver's
    folder: str  # the driver's folder for sockets


@dataclass(frozen=True, slots=True)
class OpenSender:
    """Open the addresses of a sync; answer with them, or with nothing from a rank without receivers."""

    folder: str
    token: str = field(repr=False)
    bucket_bytes: int
    timeout_s: float  # until the deadline of the sync
    version: int
    on_device: bool  # whether buckets are in device memory; the same on all ranks, because digests depend on it
    receivers: tuple[tuple[tuple[str, int], ...], ...]  # of each rank: replica and rank
    boxes: tuple[str, ...]  # of each rank: the boxes that its receivers need, as text; empty: whole tensors


@dataclass(frozen=True, slots=True)
class SendStream:
    """Gather a stream and send it; answer with `Sent` as a dict, or with nothing from a rank without receivers."""

    version: int


Order = Locate | OpenSender | SendStream
Answer = dict[str, Any] | None
Needs = tuple[str | None, ...]
"""Of each rank: the boxes that it sends, as text; empty: whole tensors, None: nothing."""


@dataclass(frozen=True, slots=True)
class RankLocation:
    """Location of a rank."""

    here: bool  # on the driver's machine, and it sees the driver's folder
    process: int
    device: str  # its name, equal in every process of the machine; empty: none
    shares: bool  # whether other processes can open its device memory


def machine() -> str:
    """The name of this machine, equal in all its containers."""
    return BOOT.read_text(encoding="ascii").strip() if BOOT.is_file() else gethostname()


class RankSender:
    """Carries out the orders of one rank. Keeps its buckets for the next sync."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engine: _RankEngine | None = None
        self._drops: Any = None  # socket; None: no sync is open, or this rank has no receivers
        self._deadline = 0.0
        self._needs: Needs = ()

    def follow(self, order: Order, rank: int, stream: Callable[[Needs], NamedTensors]) -> Answer:
        """Carry out an order, on the thread of the worker; `stream` begins to gather what the ranks need."""
        if isinstance(order, Locate):
            here = order.machine == machine() and not is_free(Path(order.folder))
            return asdict(RankLocation(here, os.getpid(), own_device(), shares_memory()))
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        if isinstance(order, OpenSender):
            return self._loop.run_until_complete(self._open(order, rank))
        return self._loop.run_until_complete(self._send(stream(self._needs), order.version))

    async def _open(self, order: OpenSender, rank: int) -> Answer:
        await self._end()  # a sync that failed before it was sent
        self._needs = tuple(text if some else None for text, some in zip(order.boxes, order.receivers, strict=True))
        receivers = order.receivers[rank]
        if not receivers:
            return None
        if self._engine is None or not self._engine.fits(order):
            if self._engine is not None:
                await self._engine.close()
            self._engine = _RankEngine(order)
        self._engine.begin(order, rank)
        self._deadline = time.monotonic() + order.timeout_s
        offer = self._engine.prepare(order.version, Full())
        self._drops = zmq.asyncio.Context.instance().socket(zmq.PULL)
        self._drops.setsockopt(zmq.MAXMSGSIZE, LARGEST_ANSWER)
        lock(self._drops, order.token, "sender")
        drops = f"ipc://{self._engine.sockets}/drops"
        self._drops.bind(drops)
        return {"receivers": dict(offer.address), "drops": drops}

    async def _send(self, weights: NamedTensors, version: int) -> Answer:
        if self._engine is None or self._drops is None:
            for _ in weights:
                pass
            return None
        dropping = asyncio.create_task(self._drop(self._engine), name="weights of a rank: drops")
        try:
            await self._engine.init_process_group()
            sent = await self._engine.send_weights(weights, version)
        finally:
            dropping.cancel()
            await asyncio.gather(dropping, return_exceptions=True)
            await self._end()
        return asdict(sent)

    async def _drop(self, engine: IpcEngine) -> None:
        """Stop waiting for each receiver that the driver reports as gone."""
        while (left_s := self._deadline - time.monotonic()) > 0:
            if await self._drops.poll(int(left_s * 1000) + 1):
                with suppress(BrokenMessage):  # the driver writes no such message; the next one may be the driver's
                    message = decode(*await self._drops.recv_multipart(zmq.NOBLOCK))
                    expect(message, replica=str, reason=str)
                    engine.drop(message["replica"], message["reason"])

    async def _end(self) -> None:
        """Close the sockets of a sync."""
        drops, self._drops = self._drops, None
        if drops is not None:
            drops.close(linger=0)
        if self._engine is not None:
            await self._engine.finalize()


def cut(weights: NamedTensors, boxes: BoxMap, made: dict[str, Boxed]) -> Iterator[NamedTensor]:
    """Yield boxes of tensors, and tensors without a box whole; `made` gets each box.

    The tensors are whole, or views (`hone.models.parts.views`) that have at least the box.
    """
    for name, tensor in weights:
        if name in boxes:
            made[name] = boxes[name]
            tensor = made[name].of(name, tensor)
        yield name, tensor.read() if isinstance(tensor, Viewed) else tensor


class _RankEngine(IpcEngine):
    """An `IpcEngine` for some receivers, in a folder of the driver."""

    def __init__(self, order: OpenSender) -> None:
        super().__init__(order.bucket_bytes, order.timeout_s, order.token)
        self.sockets = Path()
        self._on_device = False
        self._made: dict[str, Boxed] = {}  # the boxes that were sent

    def fits(self, order: OpenSender) -> bool:
        """Return whether the engine of an earlier sync can serve this one."""
        return (self.bucket_bytes, self._token) == (order.bucket_bytes, order.token)

    def begin(self, order: OpenSender, rank: int) -> None:
        self.timeout_s = order.timeout_s
        self.sockets = Path(order.folder) / str(rank)
        self._on_device = order.on_device
        self._receivers = order.receivers[rank]
        self._boxes = order.boxes[rank]
        self._made = {}

    async def send_weights(self, weights: NamedTensors, version: int) -> Sent:
        """As `CheckpointEngine.send_weights`, of the boxes that the receivers need."""
        return await super().send_weights(cut(weights, from_text(self._boxes), self._made), version)

    def _label(self) -> str:
        return to_text(self._made)

    def _make_folder(self) -> OwnFolder | Subfolder:
        return Subfolder(self.sockets.parent, self.sockets.name)

    def _reaches(self, channel: SenderChannel) -> bool:
        return self._on_device
