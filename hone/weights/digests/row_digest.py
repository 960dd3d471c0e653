"""The digest that every device can compute in its own memory (interface: `digest.py`).

    a tensor's rows of 2,048 bytes --> times 16 columns of small odd numbers --> 16 sums per row (int32)
        --> times an odd 64-bit number per row, summed modulo 2**64 --> 16 numbers per tensor (int64)
        --> BLAKE2b over names, dtypes, shapes and these numbers, sorted by name

This is exact integer arithmetic on the tensor's device: the result is the same on every device, and almost nothing is
copied to the host. The step from bytes to sums is an int8 matrix product, for which processors have instructions, so it
runs at the speed of memory, or of the cache if the bytes were just copied. All factors are fixed pseudo-random numbers,
independent of the weights. If two rows differ, all 16 sums agree with a probability of at most 2**-96 (2**-6 each: 64
odd numbers). Rows that differ in one byte always get different sums, because no factor is 0 and nothing overflows, and
so do tensors that differ in one row, because odd numbers have an inverse modulo 2**64. The digest detects faults, not
forgery: somebody who knows this file can construct a collision.
"""

from __future__ import annotations

import json
import timeit
from collections.abc import Iterable
from functools import lru_cache, partial
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from hone.weights.digests.packed import ROW, TOGETHER, Entry, Packed, pack, padded, together

COLUMNS = 16
_LARGEST = 63  # largest factor: the sum of two products fits into 16 bits, as some processors require
_BLOCK = 1 << 15  # rows whose factors are computed at once, and whose sums are added at once
_CPU_BLOCK = 1 << 12  # the same on a CPU, where the sums should stay in the cache
_SPLITMIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class RowsOfTensor:
    """A `PartDigest`. It is fast because each part was just written and is still in the cache."""

    def __init__(self, device: torch.device) -> None:
        self._total = torch.zeros(COLUMNS, dtype=torch.int64, device=device)
        self._block = _CPU_BLOCK if device.type == "cpu" else _BLOCK
        self._sums: list[Tensor] = []  # of the rows that are not in the total yet
        self._waiting = self._done = 0  # rows

    def take(self, data: Tensor) -> None:
        """Add the next bytes ([bytes] uint8). Each part but the last is a multiple of a row."""
        data = data.view(torch.int8)
        at_once = TOGETHER if data.is_cpu else data.numel()
        begin = 0
        while begin < data.numel():
            length = min(at_once, (self._block - self._waiting) * ROW)
            sums = _sums(data[begin : begin + length])
            self._sums.append(sums)
            self._waiting += sums.shape[0]
            begin += length
            if self._waiting == self._block:
                self._fold()

    def total(self) -> Tensor:
        """The 16 numbers of all bytes so far: [16] int64."""
        if self._sums:
            self._fold()
        return self._total

    def _fold(self) -> None:
        block, first = divmod(self._done, _BLOCK)
        numbers = _row_numbers(block, self._total.device)[first : first + self._waiting]
        self._total += (torch.cat(self._sums).long() * numbers).sum(0)
        self._done += self._waiting
        self._sums, self._waiting = [], 0


class RowDigest:
    """A `WeightDigest` by exact integer arithmetic on the tensors' device."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._headers: list[tuple[str, str, tuple[int, ...]]] = []
        self._totals: list[Tensor | RowsOfTensor] = []  # in the order of _headers: [n, 16] int64, or one tensor's
        self._rooms: dict[torch.device, Tensor] = {}  # buffers in which small tensors are packed

    def add(self, name: str, tensor: Tensor) -> None:
        """Add one tensor of any dtype, shape, device and strides. Raises ValueError for a repeated name."""
        packed = pack([(name, tensor)])
        self.add_packed(packed.data, packed.entries)

    def add_many(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Add several tensors, which is faster than one by one for small ones."""
        for some in together(tensors):
            room = self._room(some[0][1].device) if len(some) > 1 else None
            packed = pack(some, room)
            self.add_packed(packed.data, packed.entries)

    def add_packed(self, data: Tensor, entries: Iterable[Entry]) -> None:
        """Add tensors that are already packed."""
        entries = tuple(entries)
        if not entries:
            return
        end = entries[-1].begin + padded(entries[-1].size)
        packed = Packed(data[entries[0].begin : end], entries)
        for name, dtype, shape, _, _ in packed.entries:
            self._begin(name, dtype, shape)
        if len(packed.entries) == 1:
            found = RowsOfTensor(packed.data.device)
            found.take(packed.data[: packed.entries[0].size])
            self._totals.append(found)
        else:
            self._totals.append(_totals(packed))

    def open(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> RowsOfTensor:
        """Add one tensor in parts: pass its bytes to the returned object."""
        self._begin(name, dtype, shape)
        found = RowsOfTensor(device)
        self._totals.append(found)
        return found

    def hexdigest(self) -> str:
        """The 32 hexadecimal digits of everything added so far."""
        names = sorted(self._places)
        order = [self._places[name] for name in names]
        total = blake2b(json.dumps([self._headers[place] for place in order]).encode(), digest_size=16)
        if self._totals:
            found = (one.total().unsqueeze(0) if isinstance(one, RowsOfTensor) else one for one in self._totals)
            numbers = torch.cat([some.cpu() for some in found])
            total.update(numbers[order].numpy().astype("<i8").tobytes())
        return total.hexdigest()

    def _begin(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        if name in self._places:
            raise ValueError(f"the tensor {name!r} was added twice to one digest")
        self._places[name] = len(self._headers)
        self._headers.append((name, _dtype_name(dtype), shape))

    def _room(self, device: torch.device) -> Tensor:
        """A reused buffer, [bytes] uint8: allocating a new one would take longer than the work in it."""
        found = self._rooms.get(device)
        if found is None:
            found = self._rooms[device] = torch.empty(TOGETHER, dtype=torch.uint8, device=device)
        return found


@lru_cache(maxsize=64)
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _totals(packed: Packed) -> Tensor:
    """The 16 numbers of each tensor: [tensors, 16] int64. Computed on the host with numpy, which has less overhead."""
    numbers, filled, begins = _places(tuple([-(-entry.size // ROW) for entry in packed.entries]))
    totals = np.zeros((len(packed.entries), COLUMNS), np.int64)
    if len(begins):
        sums = _sums(packed.data.view(torch.int8)).cpu().numpy()
        totals[filled] = np.add.reduceat(np.multiply(sums, numbers, dtype=np.int64), begins, axis=0)
    return torch.from_numpy(totals)


@lru_cache(maxsize=1024)  # layers of a model have equal shapes
def _places(counts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For tensors with these row counts: the index of every row, the non-empty tensors, and their first rows."""
    numbers = _row_numbers(0, torch.device("cpu")).numpy()
    filled = np.flatnonzero(counts)
    begins = np.cumsum((0, *counts))[:-1][filled]
    return np.concatenate([numbers[:count] for count in counts]), filled, begins


def _sums(data: Tensor) -> Tensor:
    """Each row of bytes times the small factors, the last row padded with zeros: [rows, 16] int32."""
    whole = data.numel() // ROW
    parts = [_product(data[: whole * ROW].view(whole, ROW))] if whole else []
    if data.numel() % ROW:
        last = torch.zeros(1, ROW, dtype=torch.int8, device=data.device)
        last[0, : data.numel() % ROW] = data[whole * ROW :]
        parts.append(_product(last))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _product(rows: Tensor) -> Tensor:
    """[n, ROW] int8 times [ROW, 16] int8, as int32."""
    numbers = _numbers(rows.device)
    if not _has_product(rows.device):
        return _slow_product(rows, numbers)
    if rows.device.type != "cpu" and len(rows) <= 16:  # cuBLAS needs more rows
        return torch._int_mm(torch.cat([rows, rows.new_zeros(32 - len(rows), ROW)]), numbers)[: len(rows)]
    return torch._int_mm(rows, numbers)


def _slow_product(rows: Tensor, numbers: Tensor) -> Tensor:
    """The same product in float32, which is exact: every product and sum is an integer below 2**24."""
    return (rows.float() @ numbers.float()).int()


@lru_cache(maxsize=16)
def _has_product(device: torch.device) -> bool:
    """Return whether int8 products are exact here, and on a CPU faster than in float32; tried once, largest values.

    A processor without instructions for int8 takes twelve times as long as in float32.
    """
    rows = torch.full((512, ROW), -128, dtype=torch.int8, device=device)
    rows[1::2] = 127
    numbers = torch.full((ROW, COLUMNS), _LARGEST, dtype=torch.int8, device=device)
    numbers[:, 1::2] = -_LARGEST
    ways = [partial(product, rows, numbers) for product in (torch._int_mm, _slow_product)]
    try:
        exact = torch.equal(*(product() for product in ways))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    fast, slow = (min(timeit.repeat(product, number=1, repeat=3)) for product in ways)
    return exact and (device.type != "cpu" or fast <= slow)


@lru_cache(maxsize=16)
def _numbers(device: torch.device) -> Tensor:
    """The small factors, [ROW, 16] int8: odd numbers in -63 .. 63, from the top six bits of splitmix64 of 1, 2 ..."""
    odd = ((_splitmix(1, ROW * COLUMNS) >> 58) & 63) * 2 - _LARGEST
    return odd.to(torch.int8).view(ROW, COLUMNS).to(device)


@lru_cache(maxsize=8)
def _row_numbers(block: int, device: torch.device) -> Tensor:
    """The factors of rows, [_BLOCK, 1] int64: odd numbers, from splitmix64 after the range of `_numbers`."""
    return (_splitmix(1 + ROW * COLUMNS + block * _BLOCK, _BLOCK) | 1).view(_BLOCK, 1).to(device)


def _splitmix(first: int, count: int) -> Tensor:
    """[count] int64: splitmix64 of first, first + 1, ... (Steele et al., 2014)."""
    x = torch.arange(first, first + count, dtype=torch.int64)
    x *= _signed(_SPLITMIX[0])
    for shift, multiplier in ((30, _SPLITMIX[1]), (27, _SPLITMIX[2])):
        x ^= (x >> shift) & ((1 << (64 - shift)) - 1)
        x *= _signed(multiplier)
    return x


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
