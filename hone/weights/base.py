"""The contract of a weight sync: named tensors go in at one side, and each receiver proves what it now serves.

    trainer: get_per_tensor_param() --(name, tensor)*--> transport --> rollout engine: update_weights
                                           |                                  |
                                         digest ------- must be equal ----- receipt

`weights` knows neither side: it moves `(name, tensor)` from a source to a sink. A sync that is not acknowledged by
every replica, with the sender's digest and the version asked for, is an error: the step does not start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

NamedTensors = Iterable[tuple[str, torch.Tensor]]


class WeightSyncError(RuntimeError):
    """A replica does not serve the weights it was sent; the message names the replica and what differs."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What left the trainer in one sync."""

    version: int
    digest: str
    tensors: int
    bytes: int


class Receipt(Protocol):
    """What a replica says it serves after a sync (`hone.rollout.base.WeightReceipt`)."""

    replica: str
    version: int
    digest: str


def verify(sent: Sent, receipts: Sequence[Receipt]) -> None:
    """Raise WeightSyncError unless every replica acknowledges the version and digest that were sent."""
    if not receipts:
        raise WeightSyncError(f"no replica acknowledged weight version {sent.version}")
    for receipt in receipts:
        if receipt.version != sent.version:
            raise WeightSyncError(
                f"replica {receipt.replica} serves weight version {receipt.version}, sent was {sent.version}"
            )
        if receipt.digest != sent.digest:
            raise WeightSyncError(
                f"replica {receipt.replica} serves weights with digest {receipt.digest} for version {sent.version}, "
                f"the trainer sent {sent.digest}: a tensor was lost, stale or changed on the way"
            )
