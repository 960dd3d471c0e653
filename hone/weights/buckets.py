"""Named tensors as the content of fixed-size buckets, and back.

    tensors:  a[------] b[--] c[--------------------------] d[]            (d has no element)
    buckets:  |a[------] b[--]      |c[-------------------|--------] d[]  |
                             ^ c does not fit; as it is larger than a bucket it is cut into pieces

Pieces start with a row of the digest (`hone.models.packed`), so a piece can be viewed in its dtype, and what lies side
by side is digested side by side, right after it was copied: in the cache it costs a third. Only a tensor larger than a
bucket is cut: the receiver has to put such a one together in memory of its own, the others it can use where they lie.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hone.models.digest import TensorDigest, WeightDigest
from hone.models.packed import ROW, TOGETHER, Entry, Packed, pack, padded, size_of
from hone.weights.base import NamedTensor, NamedTensors
from hone.weights.wire import BrokenMessage

MOST_PIECES = 8192  # in one bucket: keeps its description well below the largest message
LONGEST_NAME = 1024
_MOST = 1 << 48  # elements and bytes of anything
_AT_ONCE = 1 << 24  # bytes written before the event loop gets its turn
_IN_CACHE = 1 << 19  # bytes that are still in a core's cache when they were copied

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
        self._current: tuple[str, Tensor] | None = None
        self._large: _Large | None = None  # the current one, begun
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
            placed = self._put_small(room, used, MOST_PIECES - len(pieces)) or self._put_large(room, used, bucket)
            if not placed:
                break
            pieces += placed
            used = min(used + sum(padded(piece[-1]) for piece in placed), bucket.numel())
            if used >= turn + _AT_ONCE:
                turn = used
                await asyncio.sleep(0)
        return pieces

    def _put_small(self, room: Tensor, used: int, most: int) -> list[Piece]:
        """Write the next small tensors into `room`, which begins at byte `used` of the bucket."""
        some: list[NamedTensor] = []
        total, limit = 0, min(room.numel(), TOGETHER)
        while len(some) < most and self._large is None and (current := self._next()) is not None:
            total += padded(size_of(current[1]))
            if total > limit or (some and current[1].device != some[0][1].device):
                break
            some.append(current)
            self._current = None
        if not some:
            return []
        packed = pack(some, room)
        self._digest.add_packed(packed)
        return [
            [name, dtype_name(dtype), list(shape), used + begin, 0, size]
            for name, dtype, shape, begin, size in packed.entries
        ]

    def _put_large(self, room: Tensor, used: int, bucket: Tensor) -> list[Piece]:
        """Write as much as fits of the next tensor, unless it fits into a bucket of its own: that piece."""
        if (current := self._next()) is None or room.numel() == 0:
            return []
        name, tensor = current
        if self._large is None:
            if room.numel() < size_of(tensor) <= bucket.numel():
                return []
            digest = self._digest.open(name, tensor.dtype, tuple(tensor.shape), tensor.device)
            self._large = _Large(tensor.contiguous().view(-1).view(torch.uint8), digest)
        start, length = self._large.sent, self._large.write(room)
        if self._large.sent == size_of(tensor):
            self._current = self._large = None
        return [[name, dtype_name(tensor.dtype), list(tensor.shape), used, start, length]]

    def _next(self) -> NamedTensor | None:
        if self._current is None:
            item = next(self._weights, None)
            if item is None:
                return None
            name, tensor = item[0], item[1].detach()
            if len(name) > LONGEST_NAME:
                raise ValueError(f"a weight's name has {len(name)} characters; the longest is {LONGEST_NAME}")
            dtype_name(tensor.dtype)
            self.tensors += 1
            self.bytes += size_of(tensor)
            self._current = (name, tensor)
        return self._current


class _Large:
    """A tensor that goes alone, and perhaps into several buckets."""

    def __init__(self, data: Tensor, digest: TensorDigest) -> None:
        self._data = data  # [bytes] uint8
        self._digest = digest
        self.sent = 0  # bytes

    def write(self, room: Tensor) -> int:
        """Copy and digest what fits into `room`; how many bytes."""
        part = self._data[self.sent : self.sent + room.numel()]
        self.sent += part.numel()
        if part.is_cpu and room.is_cpu:
            source, target = part.numpy(), room.numpy()
            for begin in range(0, len(source), _IN_CACHE):
                end = min(begin + _IN_CACHE, len(source))
                np.copyto(target[begin:end], source[begin:end])
                self._digest.take(part[begin:end])
        else:
            self._digest.take(part)
            room[: part.numel()].copy_(part)
        room[part.numel() : padded(part.numel())].zero_()
        return part.numel()


@lru_cache(maxsize=64)
def dtype_name(dtype: torch.dtype) -> str:
    """Raises ValueError for a dtype that cannot be sent."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"tensors of dtype {name} cannot be sent (possible: {', '.join(sorted(DTYPES))})")
    return name


class Unpacker:
    """Reads buckets back into tensors, in the order in which they were packed."""

    def __init__(self) -> None:
        self._partial: tuple[Entry, Tensor, int] | None = None  # a cut tensor, its bytes, how many have come
        self._names: set[str] = set()
        self.tensors = 0
        self.bytes = 0

    def read(self, bucket: Tensor, pieces: Sequence[Any]) -> Iterator[Packed]:
        """The tensors that end in this bucket: where they lie in it, or in own memory where a tensor was cut.

        Raises BrokenMessage for a description that does not fit the bucket or what came before.
        """
        run: list[Entry] = []  # small ones that lie side by side
        first = end = 0
        for piece in pieces:
            entry, start, length = _checked(piece, bucket.numel())
            whole = self._partial is None and start == 0 and length == entry.size
            if run and not (whole and entry.begin == end and end + entry.size - first <= TOGETHER):
                yield Packed(bucket[first:end], run)
                run = []
            if not whole:
                data = self._add(entry, start, bucket[entry.begin : entry.begin + length])
                if data is not None:
                    self._count(entry)
                    yield Packed(data, [entry._replace(begin=0)])
                continue
            self._count(entry)
            if not run:
                first = entry.begin
            run.append(entry._replace(begin=entry.begin - first))
            end = min(entry.begin + padded(entry.size), bucket.numel())
        if run:
            yield Packed(bucket[first:end], run)

    def finish(self, tensors: int, size: int) -> None:
        """Raise BrokenMessage unless exactly what the sender counted has come."""
        if self._partial is not None:
            raise BrokenMessage(f"the end came in the middle of {self._partial[0].name!r}")
        if (self.tensors, self.bytes) != (tensors, size):
            raise BrokenMessage(
                f"{self.tensors} tensors with {self.bytes} bytes came, the sender counted {tensors} with {size}"
            )

    def _count(self, entry: Entry) -> None:
        if entry.name in self._names:
            raise BrokenMessage(f"the tensor {entry.name!r} comes twice")
        self._names.add(entry.name)
        self.tensors += 1
        self.bytes += entry.size

    def _add(self, entry: Entry, start: int, data: Tensor) -> Tensor | None:
        """Put one piece of a cut tensor in its place; the tensor's bytes when that was the last."""
        name, length, total = entry.name, data.numel(), entry.size
        if self._partial is None and start == 0 and 0 < length < total:
            self._partial = (entry, torch.empty(total, dtype=torch.uint8, device=data.device), 0)
        if self._partial is None or self._partial[0][:3] != entry[:3] or self._partial[2] != start:
            raise BrokenMessage(f"a piece of {name!r} from byte {start} comes where another was due")
        if start + length > total or length == 0:
            raise BrokenMessage(f"a piece of {name!r} reaches to byte {start + length} of {total}")
        whole = self._partial[1]
        whole[start : start + length] = data
        done = start + length == total
        self._partial = None if done else (entry, whole, start + length)
        return whole if done else None


def _checked(piece: Any, size: int) -> tuple[Entry, int, int]:
    """A piece whose every field makes sense in a bucket of `size` bytes: the tensor, start, length. Raises
    BrokenMessage."""
    if not isinstance(piece, list) or len(piece) != 6:
        raise BrokenMessage(f"the description of a tensor is {str(piece)[:200]}")
    name, dtype, shape, offset, start, length = piece
    numbers = [offset, start, length, *shape] if isinstance(shape, list) else [None]
    sane = all([type(x) is int and 0 <= x < _MOST for x in numbers])  # noqa: C419  a list is faster, for each tensor
    if not isinstance(name, str) or len(name) > LONGEST_NAME or not isinstance(dtype, str) or not sane:
        raise BrokenMessage(f"the description of a tensor is {str(piece)[:200]}")
    known = DTYPES.get(dtype)
    if known is None:
        raise BrokenMessage(f"the tensor {name!r} has the unknown dtype {dtype[:40]!r}")
    if offset % ROW or offset + length > size:
        raise BrokenMessage(f"the tensor {name!r} lies at {offset}..{offset + length} of a bucket of {size} bytes")
    total = math.prod(shape) * known.itemsize
    if start + length > total:
        raise BrokenMessage(f"the tensor {name!r} of shape {shape} has fewer than {start + length} bytes")
    return Entry(name, known, tuple(shape), offset, total), start, length
