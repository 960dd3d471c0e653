"""Weight sync inside one process: the rollout engine copies the trainer's tensors into its own storage."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping

import torch

from hone.models.digest import WeightDigest
from hone.types import Metric, Metrics
from hone.weights.base import (
    CheckpointEngine,
    NamedTensor,
    NamedTensors,
    Offer,
    Payload,
    Receipt,
    Sent,
    WeightReceiver,
    WeightSyncError,
    verify,
)
from hone.weights.buckets import size_of

SinkFn = Callable[[NamedTensors, int], Awaitable[Receipt]]


class Counted:
    """A stream that takes digest, number and bytes of what passes."""

    def __init__(self, weights: NamedTensors) -> None:
        self._weights = weights
        self._digest = WeightDigest()
        self.tensors = 0
        self.bytes = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._weights:
            self._digest.add(name, tensor)
            self.tensors += 1
            self.bytes += size_of(tensor)
            yield name, tensor

    def sent(self, version: int) -> Sent:
        return Sent(version, self._digest.hexdigest(), self.tensors, self.bytes)


async def sync(weights: NamedTensors, sink: SinkFn, version: int) -> Metrics:
    """Stream `weights` into `sink` as `version`, and prove that they arrived.

    The digest is taken of each tensor as it leaves, so nothing is gathered twice. Raises WeightSyncError if the
    receiver's own digest or version differs.
    """
    started = time.perf_counter()
    counted = Counted(weights)
    receipt = await sink(counted, version)
    sent = counted.sent(version)
    verify(sent, [receipt])
    seconds = time.perf_counter() - started
    return {
        "weights/version": Metric.max(version),
        "weights/bytes": Metric.sum(sent.bytes),
        "weights/tensors": Metric.max(sent.tensors),
        "perf/weight_sync_gb_per_s": Metric.mean(sent.bytes / seconds / 1e9),
    }


class LocalEngine(CheckpointEngine):
    """The same behind the contract of all transports: receivers in this process take the trainer's own tensors."""

    transport = "local"

    def __init__(self, bucket_bytes: int, timeout_s: float, token: str) -> None:
        super().__init__(bucket_bytes, timeout_s, token)
        self._ranks: Mapping[str, int] = {}
        self._handover: _Handover | None = None
        self._session = ""

    def build_topology(self, ranks: Mapping[str, int]) -> None:
        self._ranks = dict(ranks)

    def prepare(self, version: int, payload: Payload) -> Offer:
        self._session = secrets.token_hex(8)
        self._handover = _Handover(self._ranks, self._token)
        _handovers[self._session] = self._handover
        return Offer(self.transport, version, payload, self.timeout_s, {"session": self._session})

    async def init_process_group(self) -> None:
        """Nobody to meet: it is this process."""

    async def send_weights(self, weights: NamedTensors, version: int) -> Sent:
        handover = self._handover
        if handover is None:
            raise WeightSyncError("the sync has not been prepared")
        counted = Counted(weights)
        alone = sum(self._ranks.values()) == 1
        handover.weights = iter(counted) if alone else list(counted)
        handover.there.set()
        try:
            async with asyncio.timeout(self.timeout_s):
                await handover.taken_by_all()
        except TimeoutError:
            for replica, rank in handover.waiting:
                handover.lost[replica] = f"its rank {rank} did not take the weights within {self.timeout_s:g} s"
        if alone:
            for _ in handover.weights:
                pass
        sent = counted.sent(version)
        return Sent(version, sent.digest, sent.tensors, sent.bytes, lost=handover.lost)

    def drop(self, replica: str, reason: str) -> None:
        if self._handover is not None:
            self._handover.lose(replica, reason)

    async def finalize(self) -> None:
        _handovers.pop(self._session, None)
        self._handover = None

    @classmethod
    def receiver(cls, offer: Offer, rank: int, token: str) -> WeightReceiver:
        return LocalReceiver(offer, rank, token)


class LocalReceiver(WeightReceiver):
    """A receiver in the trainer's process: on its event loop, or in another thread."""

    def init_process_group(self) -> None:
        """Find the sender, and show the token: a part of this process that was given none gets no weights either."""
        handover = _handovers.get(str(self.offer.address.get("session")))
        if handover is None:
            raise WeightSyncError(f"{self._name}: no sender of weight version {self.offer.version} in this process")
        if not self._token or not hmac.compare_digest(self._token.encode(), handover.token.encode()):
            raise WeightSyncError(f"{self._name} was refused by the sender: the token is not this run's")
        self._handover = handover

    def stream(self) -> Iterator[NamedTensor]:
        if not self._handover.there.wait(self.offer.timeout_s):
            about = f"weight version {self.offer.version}"
            raise WeightSyncError(
                f"{self._name} waited for the sender to send {about}; it did not within {self.offer.timeout_s:g} s"
            )
        yield from self._handover.weights

    def finalize(self, failure: str = "", digest: str = "") -> None:
        handover = _handovers.get(str(self.offer.address.get("session")))
        if handover is not None:
            handover.left(self.offer.replica, self.rank, failure)

    @property
    def _name(self) -> str:
        return f"{self.offer.replica}/{self.rank}"


class _Handover:
    """What one sync's sender and receivers share. Made on the event loop; receivers may be in threads."""

    def __init__(self, ranks: Mapping[str, int], token: str) -> None:
        self.token = token
        self.weights: NamedTensors = ()
        self.there = threading.Event()
        self.waiting = {(replica, rank) for replica, count in ranks.items() for rank in range(count)}
        self.lost: dict[str, str] = {}
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    async def taken_by_all(self) -> None:
        while self.waiting:
            self._changed.clear()
            await self._changed.wait()

    def left(self, replica: str, rank: int, failure: str) -> None:
        self.waiting.discard((replica, rank))
        if failure:
            self.lose(replica, f"its rank {rank}: {failure}")
        self._loop.call_soon_threadsafe(self._changed.set)

    def lose(self, replica: str, reason: str) -> None:
        self.lost.setdefault(replica, reason)
        self.waiting = {(name, rank) for name, rank in self.waiting if name != replica}
        self._loop.call_soon_threadsafe(self._changed.set)


_handovers: dict[str, _Handover] = {}
