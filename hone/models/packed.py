"""Tensors side by side in one memory: what a bucket of a weight sync holds, and what a digest reads at once.

    rows of 2,048 bytes   | a a a a | a 0 0 0 | b b b 0 | c c c c |
    entries                 a: from row 0, 1.25 rows    b: from row 2    c: from row 3

Every tensor begins with a row, and the rest of its last row is zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

ROW = 2048  # bytes
TOGETHER = 1 << 20  # bytes of small tensors that go together: they stay in a core's cache while they are worked on


class Entry(NamedTuple):
    """Where one tensor lies."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # byte, a multiple of ROW
    size: int  # bytes


@dataclass(frozen=True, slots=True)
class Packed:
    """Tensors of one device, in the order in which they lie. Iterating gives (name, tensor), views of the memory."""

    data: Tensor  # [bytes] uint8; the last row may be cut off where the last tensor ends
    entries: Sequence[Entry]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, dtype, shape, begin, size in self.entries:
            yield name, self.data[begin : begin + size].view(dtype).view(shape)

    def clone(self) -> Packed:
        """The same in memory of its own."""
        return Packed(self.data.clone(), self.entries)

    @property
    def size(self) -> int:
        """Bytes of the tensors, without what lies between them."""
        return sum(entry.size for entry in self.entries)


def padded(size: int) -> int:
    """Bytes of the whole rows that `size` bytes need."""
    return -(-size // ROW) * ROW


def size_of(tensor: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def pack(tensors: Sequence[tuple[str, Tensor]], room: Tensor | None = None) -> Packed:
    """Tensors of one device side by side, in `room` ([bytes] uint8, large enough) or in memory of their own.

    A single tensor without a room stays where it is.
    """
    entries, pieces, begin = [], [], 0
    for name, tensor in tensors:
        data = (tensor.detach() if tensor.requires_grad else tensor).contiguous().view(-1).view(torch.uint8)
        size = data.numel()
        entries.append(Entry(name, tensor.dtype, tuple(tensor.shape), begin, size))
        pieces.append(data)
        begin += size
        if gap := -size % ROW:
            pieces.append(_zeros(gap, data.device))
            begin += gap
    if room is None and len(entries) == 1:
        return Packed(pieces[0], entries)
    if not pieces:
        return Packed(torch.empty(0, dtype=torch.uint8), entries)
    if room is None or room.device != pieces[0].device:
        data = torch.cat(pieces)
        if room is not None:
            data = room[:begin].copy_(data)
    else:
        data = torch.cat(pieces, out=room[:begin])
    return Packed(data, entries)


def together(tensors: Iterable[tuple[str, Tensor]], most: int = TOGETHER) -> Iterator[list[tuple[str, Tensor]]]:
    """The tensors in groups of one device and at most `most` bytes, larger ones alone."""
    some: list[tuple[str, Tensor]] = []
    total = 0
    for name, tensor in tensors:
        size = padded(size_of(tensor))
        if some and (total + size > most or tensor.device != some[0][1].device):
            yield some
            some, total = [], 0
        some.append((name, tensor))
        total += size
    if some:
        yield some


_nothing: dict[torch.device, Tensor] = {}  # of each device, a row of zeros


def _zeros(size: int, device: torch.device) -> Tensor:
    found = _nothing.get(device)
    if found is None:
        found = _nothing[device] = torch.zeros(ROW, dtype=torch.uint8, device=device)
    return found[:size]
