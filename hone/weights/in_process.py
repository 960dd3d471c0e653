"""Weight sync inside one process: the rollout engine copies the trainer's tensors into its own storage."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import torch

from hone.types import Metric, Metrics
from hone.weights.base import LoadedWeights, NamedTensors, Sent, verify
from hone.weights.digests.row_digest import RowDigest

SinkFn = Callable[[NamedTensors, int], Awaitable[LoadedWeights]]


@dataclass(frozen=True, slots=True)
class _Receipt:
    replica: str
    version: int
    digest: str


class DigestedStream:
    """A stream of tensors that computes their digest, number and bytes as they pass."""

    def __init__(self, weights: NamedTensors) -> None:
        self._weights = weights
        self._digest = RowDigest()  # works on any device
        self.tensors = 0
        self.bytes = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._weights:
            self._digest.add(name, tensor)
            self.tensors += 1
            self.bytes += tensor.nbytes
            yield name, tensor

    def sent(self, version: int) -> Sent:
        return Sent(version, self._digest.hexdigest(), self.tensors, self.bytes)


async def sync(weights: NamedTensors, sink: SinkFn, version: int) -> Metrics:
    """Stream `weights` into `sink` as `version`, and verify that they arrived.

    The digest is computed while the tensors pass, so no tensor is gathered twice. Raises WeightSyncError if the
    receiver's digest or version differs.
    """
    started = time.perf_counter()
    stream = DigestedStream(weights)
    loaded = await sink(stream, version)
    sent = stream.sent(version)
    received = RowDigest()
    received.add_many(loaded.tensors.items())
    verify(sent, [_Receipt(loaded.replica, loaded.version, received.hexdigest())])
    seconds = time.perf_counter() - started
    return {
        "weights/version": Metric.max(version),
        "weights/bytes": Metric.sum(sent.bytes),
        "weights/tensors": Metric.max(sent.tensors),
        "perf/weight_sync_gb_per_s": Metric.mean(sent.bytes / seconds / 1e9),
    }


__all__ = ["SinkFn", "sync"]
