"""Tensors side by side in one memory: what a bucket of a weight sync holds, and what a digest reads at once.

    rows of 2,048 bytes   | a a a a | a 0 0 0 | b b b 0 | c c c c |
    entries                 a: from row 0, 1.25 rows    b: from row 2    c: from row 3

Every tensor begins with a row, and the rest of its last row is zero.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

ROW = 2048  # bytes
_PLAIN = (Tensor, torch.nn.Parameter)  # their bytes are their storage's; of other classes torch knows
TOGETHER = 1 << 20  # bytes of small tensors that torch works on together: they stay in a core's cache meanwhile
REMEMBERED = 128  # groups of tensors: the same come at every sync


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
        wholes: dict[torch.dtype, tuple[Tensor, int, int]] = {}
        for name, dtype, shape, begin, _ in self.entries:
            if dtype not in wholes:
                width = dtype.itemsize
                whole = self.data[: self.data.numel() // width * width].view(dtype)
                wholes[dtype] = whole, int(whole.storage_offset()), width
            whole, first, width = wholes[dtype]
            yield name, whole.as_strided(shape, _strides(shape), first + begin // width)

    def into(self, targets: Mapping[str, Tensor], found: list[tuple[str, Tensor]]) -> Iterator[Entry]:
        """Write one after another from host memory into the tensor of `targets` that is like it, if there is one; each
        entry comes when its tensor is there. `found` gets what iterating over `self` gives, or the target."""
        start = self.data.data_ptr()
        for entry in self.entries:
            name, _, _, begin, size = entry
            target = targets.get(name)
            if target is not None and is_like(target, entry):
                ctypes.memmove(target.data_ptr(), start + begin, size)
                found.append((name, target))
            else:
                found.extend(Packed(self.data, [entry]))
            yield entry

    @property
    def size(self) -> int:
        """Bytes of the tensors, without what lies between them."""
        return sum(entry.size for entry in self.entries)


def padded(size: int) -> int:
    """Bytes of the whole rows that `size` bytes need."""
    return -(-size // ROW) * ROW


def size_of(tensor: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.nbytes


def layout(tensors: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]) -> tuple[Entry, ...]:
    """Where each of several tensors (name, dtype, shape) lies, side by side."""
    # One is quickly laid out: it does not push out a group that is remembered.
    return _remembered(tensors) if len(tensors) > 1 else _side_by_side(tensors)


def _side_by_side(tensors: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]) -> tuple[Entry, ...]:
    entries, begin = [], 0
    for name, dtype, shape in tensors:
        entries.append(Entry(name, dtype, tuple(shape), begin, math.prod(shape) * dtype.itemsize))
        begin += padded(entries[-1].size)
    return tuple(entries)


_remembered = lru_cache(maxsize=REMEMBERED)(_side_by_side)


def pack(tensors: Sequence[tuple[str, Tensor]], room: Tensor | None = None) -> Packed:
    """Tensors of one device side by side, in `room` ([bytes] uint8, large enough) or in memory of their own.

    A single tensor without a room stays where it is.
    """
    entries = layout(tuple([(name, tensor.dtype, tensor.shape) for name, tensor in tensors]))
    if room is None and len(entries) == 1:
        return Packed(flat(tensors[0][1]), entries)
    end = entries[-1].begin + padded(entries[-1].size) if entries else 0
    if room is None:
        room = torch.empty(end, dtype=torch.uint8, device=tensors[0][1].device if entries else None)
    if room.numel() < end:
        raise ValueError(f"{len(entries)} tensors of {end} bytes do not fit into {room.numel()}")
    room = room[:end]
    if room.is_cpu and (not tensors or tensors[0][1].is_cpu):
        for _ in place(tensors, entries, room):
            pass
    elif entries:
        pieces = [part for _, tensor in tensors for part in (flat(tensor), _rest(tensor)) if part is not None]
        if pieces[0].device == room.device:
            torch.cat(pieces, out=room)
        else:
            room.copy_(torch.cat(pieces))
    return Packed(room, entries)


def place(tensors: Iterable[tuple[str, Tensor]], entries: Sequence[Entry], room: Tensor) -> Iterator[Entry]:
    """Copy one tensor after another to its place in host memory, and zeros up to the next row; each entry comes when
    its tensor is there. What torch does around the copy of a small tensor takes longer than its bytes."""
    start = room.data_ptr()
    for (_, tensor), entry in zip(tensors, entries, strict=True):
        _, dtype, shape, begin, size = entry
        if _is_plain(tensor):
            ctypes.memmove(start + begin, tensor.data_ptr(), size)
        else:
            room[begin : begin + size].view(dtype).view(shape).copy_(tensor.detach())
        if size % ROW:
            room[begin + size : begin + padded(size)].zero_()
        yield entry


def _is_plain(tensor: Tensor) -> bool:
    """Whether its bytes in host memory, from its address on, are its elements."""
    return (
        type(tensor) in _PLAIN
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def is_like(tensor: Tensor, entry: Entry) -> bool:
    """Whether an entry's bytes can be written to the address of a tensor in host memory."""
    return tensor.dtype is entry.dtype and tensor.shape == entry.shape and _is_plain(tensor)


def memory(data: Tensor) -> memoryview:
    """The bytes of a contiguous uint8 tensor in host memory, while it lives. After torch's own way, `numpy`, its
    storage could never be resized again, which is how a sleeping engine gives back its weights."""
    return memoryview((ctypes.c_ubyte * data.numel()).from_address(data.data_ptr())).cast("B")


def flat(tensor: Tensor) -> Tensor:
    """[bytes] uint8: its elements as they lie, or copied where there are gaps between them."""
    plain = (tensor.detach() if tensor.requires_grad else tensor).resolve_conj().resolve_neg()
    elements = plain.contiguous().view(-1)
    if len(elements) == 1:  # contiguous to torch, whatever its stride
        elements = elements.as_strided((1,), (1,))
    return elements.view(torch.uint8)


def _rest(tensor: Tensor) -> Tensor | None:
    """The zeros behind a tensor, if there are any."""
    gap = -size_of(tensor) % ROW
    return _zeros(gap, tensor.device) if gap else None


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


@lru_cache(maxsize=1 << 12)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


_nothing: dict[torch.device, Tensor] = {}  # of each device, a row of zeros


def _zeros(size: int, device: torch.device) -> Tensor:
    found = _nothing.get(device)
    if found is None:
        found = _nothing[device] = torch.zeros(ROW, dtype=torch.uint8, device=device)
    return found[:size]
