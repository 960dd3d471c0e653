"""Tensors packed into one buffer: the content of a bucket of a weight sync, and the input of a digest.

    rows of 2,048 bytes   | a a a a | a 0 0 0 | b b b 0 | c c c c |
    entries                 a: from row 0, 1.25 rows    b: from row 2    c: from row 3

Every tensor begins at a row, and the rest of its last row is filled with zeros.
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
_PLAIN = (Tensor, torch.nn.Parameter)  # classes whose bytes are the bytes of their storage
TOGETHER = 1 << 20  # bytes of small tensors that torch processes together; they fit into a core's cache
REMEMBERED = 128  # cached layouts of groups; every sync has the same groups


class Entry(NamedTuple):
    """The position of one tensor in a buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # byte, a multiple of ROW
    size: int  # bytes


@dataclass(frozen=True, slots=True)
class Packed:
    """Packed tensors of one device. Iterating yields (name, tensor) in order; the tensors are views of the buffer."""

    data: Tensor  # [bytes] uint8; may end with the last tensor, before the end of its row
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
        """Copy each tensor from host memory into the matching tensor of `targets`, if there is one, and yield its entry
        after the copy. `found` receives the target, or else the tensor that iterating over `self` yields."""
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
        """Bytes of the tensors, without padding."""
        return sum(entry.size for entry in self.entries)


def padded(size: int) -> int:
    """Bytes of the whole rows that `size` bytes need."""
    return -(-size // ROW) * ROW


def size_of(tensor: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.nbytes


def layout(tensors: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]) -> tuple[Entry, ...]:
    """Positions of the given tensors (name, dtype, shape) in one buffer."""
    # A single tensor is fast to lay out; keep it out of the cache of groups.
    return _remembered(tensors) if len(tensors) > 1 else _side_by_side(tensors)


def _side_by_side(tensors: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]) -> tuple[Entry, ...]:
    entries, begin = [], 0
    for name, dtype, shape in tensors:
        entries.append(Entry(name, dtype, tuple(shape), begin, math.prod(shape) * dtype.itemsize))
        begin += padded(entries[-1].size)
    return tuple(entries)


_remembered = lru_cache(maxsize=REMEMBERED)(_side_by_side)


def pack(tensors: Sequence[tuple[str, Tensor]], room: Tensor | None = None) -> Packed:
    """Pack tensors of one device into `room` ([bytes] uint8, large enough) or into new memory.

    A single tensor without `room` is not copied.
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
    """Copy each tensor to its place in host memory, with zeros up to the next row, and yield its entry after the copy.
    The copies bypass torch, whose overhead per call is larger than copying a small tensor."""
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
    """Return whether the tensor's elements are the bytes in host memory that begin at its address."""
    return (
        type(tensor) in _PLAIN
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def is_like(tensor: Tensor, entry: Entry) -> bool:
    """Return whether the bytes of `entry` can be written to the address of `tensor` in host memory."""
    return tensor.dtype is entry.dtype and tensor.shape == entry.shape and _is_plain(tensor)


def memory(data: Tensor) -> memoryview:
    """The bytes of a contiguous uint8 tensor in host memory, valid while the tensor lives. This does not use
    `tensor.numpy()`, after which torch can no longer resize the storage, which a sleeping engine needs."""
    return memoryview((ctypes.c_ubyte * data.numel()).from_address(data.data_ptr())).cast("B")


def flat(tensor: Tensor) -> Tensor:
    """The elements as [bytes] uint8: a view, or a copy if the tensor is not contiguous."""
    plain = (tensor.detach() if tensor.requires_grad else tensor).resolve_conj().resolve_neg()
    elements = plain.contiguous().view(-1)
    if len(elements) == 1:  # torch calls it contiguous whatever its stride
        elements = elements.as_strided((1,), (1,))
    return elements.view(torch.uint8)


def _rest(tensor: Tensor) -> Tensor | None:
    """The zeros that pad a tensor's last row, if it needs any."""
    gap = -size_of(tensor) % ROW
    return _zeros(gap, tensor.device) if gap else None


def together(tensors: Iterable[tuple[str, Tensor]], most: int = TOGETHER) -> Iterator[list[tuple[str, Tensor]]]:
    """Group tensors by device, at most `most` bytes per group; a larger tensor is its own group."""
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
    """Strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


_nothing: dict[torch.device, Tensor] = {}  # device -> a row of zeros


def _zeros(size: int, device: torch.device) -> Tensor:
    found = _nothing.get(device)
    if found is None:
        found = _nothing[device] = torch.zeros(ROW, dtype=torch.uint8, device=device)
    return found[:size]
