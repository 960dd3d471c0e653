"""Weight sync inside one process: the rollout engine copies the trainer's tensors into its own storage."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator

import torch

from hone.models.digest import WeightDigest
from hone.types import Metric, Metrics
from hone.weights.base import NamedTensors, Receipt, Sent, verify

SinkFn = Callable[[NamedTensors, int], Awaitable[Receipt]]


async def sync(weights: NamedTensors, sink: SinkFn, version: int) -> Metrics:
    """Stream `weights` into `sink` as `version`, and prove that they arrived.

    The digest is taken of each tensor as it leaves, so nothing is gathered twice. Raises WeightSyncError if the
    receiver's own digest or version differs.
    """
    started = time.perf_counter()
    digest = WeightDigest()
    counted = [0, 0]

    def passing() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            digest.add(name, tensor)
            counted[0] += 1
            counted[1] += tensor.numel() * tensor.element_size()
            yield name, tensor

    receipt = await sink(passing(), version)
    sent = Sent(version, digest.hexdigest(), tensors=counted[0], bytes=counted[1])
    verify(sent, [receipt])
    seconds = time.perf_counter() - started
    return {
        "weights/version": Metric.max(version),
        "weights/bytes": Metric.sum(sent.bytes),
        "weights/tensors": Metric.max(sent.tensors),
        "perf/weight_sync_gb_per_s": Metric.mean(sent.bytes / seconds / 1e9),
    }
