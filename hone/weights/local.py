"""Weight sync inside one process: the rollout engine copies the trainer's tensors into its own storage."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator

import torch

from hone.models.digest import new_digest
from hone.models.packed import size_of
from hone.types import Metric, Metrics
from hone.weights.base import NamedTensors, Receipt, Sent, verify

SinkFn = Callable[[NamedTensors, int], Awaitable[Receipt]]


class Counted:
    """A stream that takes digest, number and bytes of what passes."""

    def __init__(self, weights: NamedTensors) -> None:
        self._weights = weights
        self._digest = new_digest("rows")  # wherever each side has them
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


__all__ = ["SinkFn", "sync"]
