"""A digest (checksum) of weights: replicas that serve the same tensors get the same 32 hexadecimal digits.

    rows    exact integer arithmetic on the tensors' device; every device gets the same result, and almost nothing is
            copied to the host (`row_digest`)
    bytes   XXH3 of the bytes in host memory; the faster one if both sides have the weights there (`byte_digest`)

Only digests of the same method can be compared; any two others are never equal. Both sides of a weight sync
use the method for the memory that carries the weights (`method_for`). A digest detects faults, not forgery: somebody
who knows the method can construct a collision.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol

import torch
from torch import Tensor

from hone.weights.digests.byte_digest import ByteDigest
from hone.weights.digests.packed import Entry
from hone.weights.digests.row_digest import RowDigest

Method = Literal["rows", "bytes"]


class PartDigest(Protocol):
    """The digest of one tensor whose bytes arrive in parts."""

    def take(self, data: Tensor) -> None:
        """Add the next bytes ([bytes] uint8). Each part but the last is a multiple of a row (see `packed.py`)."""


class WeightDigest(Protocol):
    """The digest of tensors that are added one by one or in groups, while they are sent or received.

    It depends on every name, dtype and shape, and on every bit and its position (NaN payloads and -0.0 too). It does
    not depend on the order or grouping of the tensors. All methods that add raise ValueError for a repeated name.
    """

    def add(self, name: str, tensor: Tensor) -> None:
        """Add one tensor of any dtype, shape, device and strides."""

    def add_many(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Add several tensors, which is faster than one by one for small ones."""

    def add_packed(self, data: Tensor, entries: Iterable[Entry]) -> None:
        """Add tensors that are packed in `data` ([bytes] uint8). `entries` may be an iterator that copies each tensor
        just before it is read: an entry is only requested after the tensors before it were read."""

    def open(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> PartDigest:
        """Add one tensor in parts: pass its bytes to the returned object."""

    def hexdigest(self) -> str:
        """The 32 hexadecimal digits of everything added so far."""


def add_label(digest: WeightDigest, text: str) -> None:
    """Add a text to a digest, such as which boxes of the tensors it covers. No tensor has its name."""
    digest.add("\0label", torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))


def new_digest(method: Method) -> WeightDigest:
    return ByteDigest() if method == "bytes" else RowDigest()


def method_for(device: torch.device) -> Method:
    """The faster method for tensors in the memory of `device`."""
    return "bytes" if device.type == "cpu" else "rows"


def digest_tensors(tensors: Iterable[tuple[str, Tensor]], method: Method = "rows") -> str:
    """The digest of named tensors in any order; see `WeightDigest`."""
    digest = new_digest(method)
    digest.add_many(tensors)
    return digest.hexdigest()
