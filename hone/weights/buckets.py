"""Named tensors as the content of fixed-size buckets, and back.

    tensors:  a[------] b[--] c[--------------------------] d[]            (d has no element)
    buckets:  |a[------] b[--]      |c[-------------------|--------] d[]  |
                             ^ c does not fit; as it is larger than a bucket it is cut into pieces

Pieces start at multiples of 64 bytes, so a piece can be viewed in its dtype. Only a tensor larger than a bucket is cut:
the receiver has to put such a one together in memory of its own, the others it can use where they lie.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hone.models.digest import TOGETHER, WeightDigest, together
from hone.weights.base import NamedTensor, NamedTensors
from hone.weights.wire import BrokenMessage

ALIGNMENT = 64
MOST_PIECES = 8192  # in one bucket: keeps its description well below the largest message
LONGEST_NAME = 1024
_MOST = 1 << 48  # elements and bytes of anything
_AT_ONCE = 1 << 24  # bytes written before the event loop gets its turn

_SENT = (
    "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 complex64 "
    "complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"
)
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _SENT.split() if hasattr(torch, name)}

Piece = list[Any]  # name, dtype, shape, offset in the bucket, start in the tensor, length; the last three in bytes


class Packer:
    """Writes tensors into one bucket after another, taking their digest as they leave.

    Small ones go together: a few calls of torch for each would cost more than their bytes.
    """

    def __init__(self, weights: NamedTensors) -> None:
        self._weights = iter(weights)
        self._current: tuple[str, Tensor, int] | None = None  # name, tensor, bytes of it that are already sent
        self._digest = WeightDigest()
        self.tensors = 0
        self.bytes = 0

    def hexdigest(self) -> str:
        """Of everything that was packed."""
        return self._digest.hexdigest()

    async def fill(self, bucket: Tensor) -> list[Piece]:
        """Write the next tensors into `bucket` ([bytes] uint8); nothing is left when no piece comes back."""
        pieces: list[Piece] = []
        used = turn = 0
        while len(pieces) < MOST_PIECES:
            room = bucket[used:]
            placed = self._put_small(room, MOST_PIECES - len(pieces)) or self._put_large(room, bucket.numel())
            if not placed:
                break
            for name, tensor, start, length in placed:
                pieces.append([name, _dtype_name(tensor), list(tensor.shape), used, start, length])
                used = min(used + _padded(length), bucket.numel())
            if used >= turn + _AT_ONCE:
                turn = used
                await asyncio.sleep(0)
        return pieces

    def _put_small(self, room: Tensor, most: int) -> list[tuple[str, Tensor, int, int]]:
        """Write the next small tensors into `room`: name, tensor, 0, bytes of each."""
        some: list[NamedTensor] = []
        total = 0
        while len(some) < most and (current := self._next()) is not None:
            name, tensor, start = current
            total += _padded(size_of(tensor))
            if start or total > min(room.numel(), TOGETHER) or (some and tensor.device != some[0][1].device):
                break
            some.append((name, tensor.contiguous()))
            self._current = None
        if some:
            self._digest.add_many(some)
            _write_together([_bytes_of(tensor) for _, tensor in some], room)
        return [(name, tensor, 0, size_of(tensor)) for name, tensor in some]

    def _put_large(self, room: Tensor, whole: int) -> list[tuple[str, Tensor, int, int]]:
        """Write as much as fits of the next tensor, unless it fits into a bucket (`whole`) of its own: that piece."""
        if (current := self._next()) is None or room.numel() == 0:
            return []
        name, tensor, start = current
        left = size_of(tensor) - start
        if left > room.numel() and size_of(tensor) <= whole:
            return []
        if start == 0:
            self._digest.add(name, tensor)
            if left > room.numel():
                tensor = tensor.contiguous()  # once, not for each piece
        length = min(left, room.numel())
        _write(tensor, start, room[:length])
        self._current = (name, tensor, start + length) if length < left else None
        return [(name, tensor, start, length)]

    def _next(self) -> tuple[str, Tensor, int] | None:
        if self._current is None:
            item = next(self._weights, None)
            if item is None:
                return None
            name, tensor = item[0], item[1].detach()
            if len(name) > LONGEST_NAME:
                raise ValueError(f"a weight's name has {len(name)} characters; the longest is {LONGEST_NAME}")
            self.tensors += 1
            self.bytes += size_of(tensor)
            self._current = (name, tensor, 0)
        return self._current


def size_of(tensor: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def _dtype_name(tensor: Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"tensors of dtype {name} cannot be sent (possible: {', '.join(sorted(DTYPES))})")
    return name


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _bytes_of(tensor: Tensor) -> Tensor:
    """[bytes] uint8: a contiguous tensor's elements."""
    return tensor.view(-1).view(torch.uint8)


def _write(tensor: Tensor, start: int, room: Tensor) -> None:
    """Copy bytes [start, start + len(room)) of a tensor's elements, in row-major order, into `room`."""
    if tensor.is_cpu and room.is_cpu and tensor.is_contiguous():
        np.copyto(room.numpy(), _bytes_of(tensor)[start : start + room.numel()].numpy())  # twice as fast as copy_
    elif room.numel() == size_of(tensor):
        room.view(tensor.dtype).view(tensor.shape).copy_(tensor)  # one copy, also from another device or with strides
    else:
        room.copy_(_bytes_of(tensor.contiguous())[start : start + room.numel()])


def _write_together(data: Sequence[Tensor], room: Tensor) -> None:
    """Copy bytes of tensors of one device into `room`, each to the next multiple of `ALIGNMENT`."""
    pieces: list[Tensor] = []
    for one in data:
        pieces.append(one)
        if gap := -one.numel() % ALIGNMENT:
            pieces.append(one.new_zeros(gap))
    total = sum(piece.numel() for piece in pieces)
    if data[0].device == room.device:
        torch.cat(pieces, out=room[:total])
    elif total:
        room[:total].copy_(torch.cat(pieces))


class Unpacker:
    """Reads buckets back into tensors, in the order in which they were packed."""

    def __init__(self) -> None:
        self._partial: tuple[str, str, list[int], Tensor, int] | None = None  # ..., its bytes, how many have come
        self._names: set[str] = set()
        self.tensors = 0
        self.bytes = 0

    def groups(self, bucket: Tensor, pieces: Sequence[Any]) -> Iterator[list[NamedTensor]]:
        """What `read` gives, small ones together."""
        return together(self.read(bucket, pieces))

    def read(self, bucket: Tensor, pieces: Sequence[Any]) -> Iterator[NamedTensor]:
        """The tensors that end in this bucket: views of it, or own memory where the tensor was cut.

        Raises BrokenMessage for a description that does not fit the bucket or what came before.
        """
        for piece in pieces:
            name, dtype, shape, offset, start, length = _checked(piece, bucket.numel())
            total = math.prod(shape) * DTYPES[dtype].itemsize
            data = bucket[offset : offset + length]
            if self._partial is None and start == 0 and length == total:
                self._count(name, total)
                yield name, data.view(DTYPES[dtype]).view(shape)
                continue
            whole = self._add(piece, total, data)
            if whole is not None:
                self._count(name, total)
                yield name, whole.view(DTYPES[dtype]).view(shape)

    def finish(self, tensors: int, size: int) -> None:
        """Raise BrokenMessage unless exactly what the sender counted has come."""
        if self._partial is not None:
            raise BrokenMessage(f"the end came in the middle of {self._partial[0]!r}")
        if (self.tensors, self.bytes) != (tensors, size):
            raise BrokenMessage(
                f"{self.tensors} tensors with {self.bytes} bytes came, the sender counted {tensors} with {size}"
            )

    def _count(self, name: str, size: int) -> None:
        if name in self._names:
            raise BrokenMessage(f"the tensor {name!r} comes twice")
        self._names.add(name)
        self.tensors += 1
        self.bytes += size

    def _add(self, piece: Sequence[Any], total: int, data: Tensor) -> Tensor | None:
        """Put one piece of a cut tensor in its place; the tensor's bytes when that was the last."""
        name, dtype, shape, _, start, length = piece
        if self._partial is None and start == 0 and 0 < length < total:
            self._partial = (name, dtype, shape, torch.empty(total, dtype=torch.uint8, device=data.device), 0)
        if self._partial is None or self._partial[:3] != (name, dtype, shape) or self._partial[4] != start:
            raise BrokenMessage(f"a piece of {name!r} from byte {start} comes where another was due")
        whole = self._partial[3]
        if start + length > total or length == 0:
            raise BrokenMessage(f"a piece of {name!r} reaches to byte {start + length} of {total}")
        whole[start : start + length] = data
        done = start + length == total
        self._partial = None if done else (name, dtype, shape, whole, start + length)
        return whole if done else None


def _checked(piece: Any, size: int) -> tuple[str, str, list[int], int, int, int]:
    """A piece whose every field makes sense in a bucket of `size` bytes. Raises BrokenMessage."""
    if not isinstance(piece, list) or len(piece) != 6:
        raise BrokenMessage(f"the description of a tensor is {str(piece)[:200]}")
    name, dtype, shape, offset, start, length = piece
    whole = isinstance(shape, list) and all(type(x) is int and 0 <= x < _MOST for x in (offset, start, length, *shape))
    if not isinstance(name, str) or len(name) > LONGEST_NAME or not isinstance(dtype, str) or not whole:
        raise BrokenMessage(f"the description of a tensor is {str(piece)[:200]}")
    if dtype not in DTYPES:
        raise BrokenMessage(f"the tensor {name!r} has the unknown dtype {dtype[:40]!r}")
    if offset % ALIGNMENT or offset + length > size:
        raise BrokenMessage(f"the tensor {name!r} lies at {offset}..{offset + length} of a bucket of {size} bytes")
    if start + length > math.prod(shape) * DTYPES[dtype].itemsize:
        raise BrokenMessage(f"the tensor {name!r} of shape {shape} has fewer than {start + length} bytes")
    return name, dtype, shape, offset, start, length
