"""A digest of weights: two replicas that serve the same tensors say the same 32 hexadecimal digits.

    tensor's bytes --rows of 2,048--> times 16 columns of small odd numbers --> 16 sums (int32) per row: 1/32 as much
        --again, until at most 16 KiB are left--> BLAKE2b(name, dtype, shape, what is left) per tensor
        --> BLAKE2b over the tensors, sorted by name

The arithmetic is exact integer arithmetic on the tensor's own device: the result is the same on every device, and next
to nothing travels to the host. The step from bytes to sums is the matrix product of int8 that processors have
instructions for, so it runs at the speed of memory. The numbers are pseudo-random, fixed, and independent of weights:
of two rows that differ, all 16 sums agree with a chance of at most 2**-96 (2**-6 for each: 64 odd numbers); rows that
differ in one byte always differ, because no number is 0 and none can overflow. The digest guards against faults, not
against forgery: an adversary who knows this file can construct a collision.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

ROW = 2048  # bytes; sums of so many products stay below 2**24, where float32 is exact too
COLUMNS = 16
_LARGEST = 63  # of the numbers: two products fit into 16 bits, in which some processors add them up
_SMALL = 1 << 14  # bytes that are not reduced any further
_ONE_PASS = _SMALL // (COLUMNS * 4) * ROW  # bytes of which one reduction leaves no more than that
TOGETHER = 1 << 19  # bytes of small tensors that are taken in at once: they stay in the cache
_SPLITMIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class WeightDigest:
    """The digest of tensors that come one at a time or several together, on their way to somewhere else.

    Sensitive to every name, dtype, shape, and to every bit and its position (NaN payloads and -0.0 included);
    the order in which tensors are added does not matter, nor which come together.
    """

    def __init__(self) -> None:
        self._headers: dict[str, str] = {}
        self._parts: dict[str, tuple[Tensor, int, int]] = {}  # what is left of each: bytes from .. to of a tensor
        self._rooms: dict[torch.device, Tensor] = {}  # where small tensors are put side by side

    def add(self, name: str, tensor: Tensor) -> None:
        """Take in one tensor (any dtype, shape, device, strides). Raises ValueError if the name was there before."""
        self.add_many([(name, tensor)])

    def add_many(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take in several: what a small tensor costs beyond its bytes is shared among them."""
        waiting: dict[tuple[bool, torch.device], list[tuple[str, Tensor]]] = {}
        for name, tensor in tensors:
            if name in self._headers:
                raise ValueError(f"the tensor {name!r} comes twice in one digest")
            self._headers[name] = f"{name}\0{_dtype_name(tensor.dtype)}\0{tuple(tensor.shape)}\0"
            data = tensor.detach().contiguous().view(-1).view(torch.int8)
            if data.numel() > _ONE_PASS:
                left = _reduced(data)
                self._parts[name] = (left, 0, left.numel())
            else:
                waiting.setdefault((data.numel() > _SMALL, data.device), []).append((name, data))
        for (reduce, _), together in waiting.items():
            self._take(together, reduce)

    def _take(self, together: list[tuple[str, Tensor]], reduce: bool) -> None:
        """Keep the bytes of tensors of one device; reduced once, in one product, if `reduce`."""
        row, kept = (ROW, COLUMNS * 4) if reduce else (1, 1)
        pieces, begin = [], 0
        places: dict[str, tuple[int, int]] = {}
        for name, data in together:
            rows = -(-data.numel() // row)
            pieces.append(data)
            if rows * row > data.numel():
                pieces.append(data.new_zeros(rows * row - data.numel()))
            places[name] = (begin, begin + rows * kept)
            begin += rows * kept
        if not reduce:
            left = torch.cat(pieces)
        elif len(pieces) == 1:
            left = _sums(pieces[0], 0).view(-1).view(torch.int8)
        else:
            room = self._room(pieces[0].device, begin // kept * row)
            left = _sums(torch.cat(pieces, out=room), 0).view(-1).view(torch.int8)
        for name, (first, last) in places.items():
            self._parts[name] = (left, first, last)

    def _room(self, device: torch.device, size: int) -> Tensor:
        """[size] int8 that is used again and again: memory from the system would cost more than what is done in it."""
        found = self._rooms.get(device)
        if found is None or found.numel() < size:
            found = self._rooms[device] = torch.empty(max(size, 2 * TOGETHER), dtype=torch.int8, device=device)
        return found[:size]

    def hexdigest(self) -> str:
        """32 hexadecimal digits for everything added so far."""
        total = blake2b(digest_size=16)
        fetched: dict[int, Any] = {}  # what came together is fetched from its device once
        for name in sorted(self._parts):
            left, first, last = self._parts[name]
            if id(left) not in fetched:
                fetched[id(left)] = left.cpu().numpy().data
            part = blake2b(self._headers[name].encode(), digest_size=16)
            part.update(fetched[id(left)][first:last])
            total.update(part.digest())
        return total.hexdigest()


def digest_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The digest of named tensors, whatever order they come in; see `WeightDigest`."""
    digest = WeightDigest()
    for some in together(tensors):
        digest.add_many(some)
    return digest.hexdigest()


def together(tensors: Iterable[tuple[str, Tensor]], most: int = TOGETHER) -> Iterator[list[tuple[str, Tensor]]]:
    """The tensors in groups of at most `most` bytes, larger ones alone."""
    some: list[tuple[str, Tensor]] = []
    total = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if some and total + size > most:
            yield some
            some, total = [], 0
        some.append((name, tensor))
        total += size
    if some:
        yield some


@lru_cache(maxsize=64)
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _reduced(left: Tensor) -> Tensor:
    """[at most _SMALL] int8: more bytes than that, reduced to sums until they are few."""
    level = 0
    while left.numel() > _SMALL:
        left = _sums(left, level).view(-1).view(torch.int8)
        level += 1
    return left


def _sums(data: Tensor, level: int) -> Tensor:
    """[rows, 16] int32: each row of bytes times the numbers of this level, the last row filled up with zeros."""
    whole = data.numel() // ROW
    parts = [_product(data[: whole * ROW].view(whole, ROW), level)] if whole else []
    if data.numel() % ROW:
        last = torch.zeros(1, ROW, dtype=torch.int8, device=data.device)
        last[0, : data.numel() % ROW] = data[whole * ROW :]
        parts.append(_product(last, level))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _product(rows: Tensor, level: int) -> Tensor:
    """[n, ROW] int8 times [ROW, 16] int8, as int32."""
    numbers = _numbers(level, rows.device)
    if not _has_product(rows.device):
        return _slow_product(rows, numbers)
    if rows.device.type != "cpu" and len(rows) <= 16:  # cuBLAS wants more rows
        return torch._int_mm(torch.cat([rows, rows.new_zeros(32 - len(rows), ROW)]), numbers)[: len(rows)]
    return torch._int_mm(rows, numbers)


def _slow_product(rows: Tensor, numbers: Tensor) -> Tensor:
    """The same in float32: every product and sum is a whole number that it holds exactly."""
    return (rows.float() @ numbers.float()).int()


@lru_cache(maxsize=16)
def _has_product(device: torch.device) -> bool:
    """Whether this device multiplies int8 matrices, and exactly: tried once with the largest numbers there are."""
    rows = torch.full((32, ROW), -128, dtype=torch.int8, device=device)
    rows[1::2] = 127
    numbers = torch.full((ROW, COLUMNS), _LARGEST, dtype=torch.int8, device=device)
    numbers[:, 1::2] = -_LARGEST
    try:
        return torch.equal(torch._int_mm(rows, numbers), _slow_product(rows, numbers))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


@lru_cache(maxsize=16)
def _numbers(level: int, device: torch.device) -> Tensor:
    """[ROW, 16] int8: odd numbers of -63 .. 63, from splitmix64 of the place."""
    x = torch.arange(1, ROW * COLUMNS + 1, dtype=torch.int64) + level * ROW * COLUMNS
    x *= _signed(_SPLITMIX[0])
    for shift, multiplier in ((30, _SPLITMIX[1]), (27, _SPLITMIX[2])):
        x ^= (x >> shift) & ((1 << (64 - shift)) - 1)
        x *= _signed(multiplier)
    odd = ((x >> 58) & 63) * 2 - _LARGEST
    return odd.to(torch.int8).view(ROW, COLUMNS).to(device)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
