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

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b

import torch
from torch import Tensor

ROW = 2048  # bytes; sums of so many products stay below 2**24, where float32 is exact too
COLUMNS = 16
_LARGEST = 63  # of the numbers: two products fit into 16 bits, in which some processors add them up
_SMALL = 1 << 14  # bytes that are not reduced any further
_SPLITMIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class WeightDigest:
    """The digest of tensors that come one at a time, on their way to somewhere else.

    Sensitive to every name, dtype, shape, and to every bit and its position (NaN payloads and -0.0 included);
    the order in which tensors are added does not matter.
    """

    def __init__(self) -> None:
        self._parts: dict[str, tuple[str, Tensor]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Take in one tensor (any dtype, shape, device, strides). Raises ValueError if the name was there before."""
        if name in self._parts:
            raise ValueError(f"the tensor {name!r} comes twice in one digest")
        header = f"{name}\0{str(tensor.dtype).removeprefix('torch.')}\0{tuple(tensor.shape)}\0"
        self._parts[name] = (header, _reduced(tensor.detach()))

    def hexdigest(self) -> str:
        """32 hexadecimal digits for everything added so far."""
        total = blake2b(digest_size=16)
        for name in sorted(self._parts):
            header, sums = self._parts[name]
            part = blake2b(header.encode(), digest_size=16)
            part.update(sums.cpu().numpy().data)
            total.update(part.digest())
        return total.hexdigest()


def digest_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The digest of named tensors, whatever order they come in; see `WeightDigest`."""
    digest = WeightDigest()
    for name, tensor in tensors:
        digest.add(name, tensor)
    return digest.hexdigest()


def _reduced(tensor: Tensor) -> Tensor:
    """[at most _SMALL] int8: the tensor's bytes, reduced to sums until they are few; in memory of its own."""
    left = tensor.contiguous().view(-1).view(torch.int8)
    if left.numel() <= _SMALL:
        return left.clone()
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
