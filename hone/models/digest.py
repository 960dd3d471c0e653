"""A digest of weights: two replicas that serve the same tensors say the same 32 hexadecimal digits.

    rows    exact integer arithmetic on the tensors' own device: next to nothing travels to the host, and every device
            gets the same                                                                     (`hone.models.row_digest`)
    bytes   XXH3 of the bytes in host memory: where both sides have them there, the faster one
                                                                                             (`hone.models.byte_digest`)

Two digests can be compared if they were taken by the same method; those of different methods are never equal. A weight
sync takes the method of the memory through which it goes (`method_for`), on both sides. A digest guards against faults,
not against forgery: an adversary who knows how it is taken can construct a collision.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol

import torch
from torch import Tensor

from hone.models.byte_digest import ByteDigest
from hone.models.packed import Entry
from hone.models.row_digest import RowDigest

Method = Literal["rows", "bytes"]


class PartDigest(Protocol):
    """Of one tensor, whose bytes come one part after another."""

    def take(self, data: Tensor) -> None:
        """The next bytes ([bytes] uint8): a multiple of a row (`hone.models.packed`), except the last."""


class WeightDigest(Protocol):
    """The digest of tensors that come one at a time or several together, on their way to somewhere else.

    Sensitive to every name, dtype, shape, and to every bit and its position (NaN payloads and -0.0 included);
    the order in which tensors are added does not matter, nor which come together. Every way of adding raises ValueError
    for a name that was there before.
    """

    def add(self, name: str, tensor: Tensor) -> None:
        """Take in one tensor (any dtype, shape, device, strides)."""

    def add_many(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take in several: what a small tensor costs beyond its bytes may be shared among them."""

    def add_packed(self, data: Tensor, entries: Iterable[Entry]) -> None:
        """Take in tensors that lie side by side in `data` ([bytes] uint8). An entry is not asked for before those in
        front of it were read, where that is the cheaper order: so each can be copied just before."""

    def open(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> PartDigest:
        """Take in one tensor whose bytes are handed to what this returns."""

    def hexdigest(self) -> str:
        """32 hexadecimal digits for everything added so far."""


def new_digest(method: Method) -> WeightDigest:
    return ByteDigest() if method == "bytes" else RowDigest()


def method_for(device: torch.device) -> Method:
    """The cheaper method for what lies in the memory of `device`."""
    return "bytes" if device.type == "cpu" else "rows"


def digest_tensors(tensors: Iterable[tuple[str, Tensor]], method: Method = "rows") -> str:
    """The digest of named tensors, whatever order they come in; see `WeightDigest`."""
    digest = new_digest(method)
    digest.add_many(tensors)
    return digest.hexdigest()
