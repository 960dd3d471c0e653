"""Pack named tensors into buckets of fixed size, and unpack them.

    tensors:  a[------] b[--] c[--------------------------] d[]            (d is empty)
    buckets:  |a[------] b[--]      |c[-------------------|--------] d[]  |
                             ^ c does not fit; it is larger than a bucket, so it is cut into pieces

Small tensors are sent in groups (`hone.weights.digests.packed`), which are copied and digested while they are in the
processor's cache. The text that describes a group is the same at every sync. A large tensor is sent alone, on a CPU in
parts: the receiver digests one part while the sender writes the next. The receiver uses tensors in the bucket without a
copy, unless a tensor is larger than a bucket: then it joins the pieces in its own memory.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hone.weights.base import Arrival, Intake, NamedTensor, NamedTensors
from hone.weights.digests.digest import Method, PartDigest, add_label, new_digest
from hone.weights.digests.packed import (
    REMEMBERED,
    ROW,
    TOGETHER,
    Entry,
    Packed,
    flat,
    is_like,
    layout,
    memory,
    pack,
    padded,
    place,
    size_of,
)
from hone.weights.transports.bucketed.wire import BrokenMessage

MOST_TENSORS = 8192  # per bucket; keeps their description well below the largest message
MOST_TOGETHER = 1024  # per group; bounds the cache of its layout
LONGEST_NAME = 1024
_MOST = 1 << 48  # limit of any count of elements or bytes
_AT_ONCE = 1 << 24  # bytes written before the event loop runs again
_IN_CACHE = 1 << 19  # bytes that stay in a core's cache after a copy

_SENT = (
    "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 complex64 "
    "complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"
)
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _SENT.split() if hasattr(torch, name)}

Group = list[Any]  # [position in the bucket, text of `_describe`]: packed tensors, or a piece of one


class Filled(NamedTuple):
    """The content that was written to a bucket."""

    groups: list[Group]
    used: int  # bytes of the bucket up to the end of the content, in whole rows


class Packer:
    """Writes tensors into one bucket after another, and computes their digest.

    Small tensors are handled in groups, because torch's overhead per call exceeds the cost of copying them.
    """

    def __init__(self, weights: NamedTensors, method: Method, enough: int = _MOST) -> None:
        """`method`: of the digest. `enough`: bytes that one `fill` writes, a multiple of a row."""
        self._weights = iter(weights)
        self._enough = enough
        self._waiting: NamedTensor | None = None  # the next tensor, which did not fit
        self._large: _Large | None = None  # the large tensor in progress
        self._digest = new_digest(method)
        self.tensors = 0
        self.bytes = 0

    def hexdigest(self) -> str:
        """The digest of everything that was packed."""
        return self._digest.hexdigest()

    def label(self, text: str) -> None:
        """Make the digest cover a text too."""
        if text:
            add_label(self._digest, text)

    @property
    def midway(self) -> bool:
        """Return whether a large tensor is only partly written."""
        return self._large is not None

    async def fill(self, bucket: Tensor, begin: int = 0) -> Filled:
        """Write the next tensors into `bucket` ([bytes] uint8) from byte `begin`. If the result has no groups, the next
        tensor did not fit; at the beginning of a bucket it means that no tensor is left."""
        groups: list[Group] = []
        used = turn = begin
        tensors = 0
        while tensors < MOST_TENSORS and used - begin < self._enough:
            room = bucket[used:]
            if self._large is None and (entries := self._put_small(room, MOST_TENSORS - tensors)):
                length = entries[-1].begin + entries[-1].size
                groups.append([used, _describe(entries, 0, length)])
                tensors += len(entries)
            elif room.numel() and (large := self._large or self._open_large(room, bucket.numel())):
                start, length = large.sent, large.write(room[: self._enough])
                groups.append([used, _describe(large.entries, start, length)])
                self._large = large if large.left else None
            else:
                break
            used += padded(length)
            if used >= turn + _AT_ONCE:
                turn = used
                await asyncio.sleep(0)
        return Filled(groups, used)

    def _put_small(self, room: Tensor, most: int) -> tuple[Entry, ...]:
        """Write at most `most` of the next small tensors into `room`."""
        item = self._waiting or next(self._weights, None)
        if item is None:
            return ()
        some: list[NamedTensor] = []
        device = item[1].device
        one_by_one = room.is_cpu and device.type == "cpu"
        left = min(room.numel(), min(self._enough, _AT_ONCE) if one_by_one else TOGETHER)
        small = _IN_CACHE if one_by_one else left
        most = min(most, MOST_TOGETHER)
        while item is not None and len(some) < most:
            tensor = item[1]
            size = padded(tensor.nbytes)
            left -= size
            if left < 0 or size > small or tensor.device != device:
                break
            some.append(item)
            item = next(self._weights, None)
        self._waiting = item
        if not some:
            return ()
        entries = layout(tuple([(name, tensor.dtype, tensor.shape) for name, tensor in some]))
        if one_by_one:
            self._digest.add_packed(room, place(some, entries, room))
        else:
            packed = pack(some, room)
            self._digest.add_packed(packed.data, entries)
        self._count(entries)
        return entries

    def _open_large(self, room: Tensor, largest: int) -> _Large | None:
        """Begin with the waiting tensor, unless it would fit into the next bucket of `largest` bytes."""
        if self._waiting is None or room.numel() < size_of(self._waiting[1]) <= largest:
            return None
        (name, tensor), self._waiting = self._waiting, None
        entries = layout(((name, tensor.dtype, tensor.shape),))
        self._count(entries)
        digest = self._digest.open(name, tensor.dtype, entries[0].shape, room.device)
        return _Large(entries, tensor, digest)

    def _count(self, entries: Sequence[Entry]) -> None:
        self.tensors += len(entries)
        self.bytes += sum([entry.size for entry in entries])


class _Large:
    """A tensor that is sent alone, and perhaps in several buckets."""

    def __init__(self, entries: tuple[Entry, ...], tensor: Tensor, digest: PartDigest) -> None:
        self.entries = entries  # one
        self.sent = 0  # bytes
        self._data = flat(tensor)
        self._digest = digest

    @property
    def left(self) -> int:
        """Bytes."""
        return self._data.numel() - self.sent

    def write(self, room: Tensor) -> int:
        """Copy and digest as much as fits into `room`; return the number of bytes."""
        part = self._data[self.sent : self.sent + room.numel()]
        self.sent += part.numel()
        _take(part, room, self._digest)
        room[part.numel() : padded(part.numel())].zero_()
        return part.numel()


def _take(part: Tensor, target: Tensor, digest: PartDigest | None) -> None:
    """Copy `part` to the beginning of `target`, and digest it there while it is in the cache."""
    size = part.numel()
    if part.is_cpu and target.is_cpu:
        source, there = memory(part), memory(target)
        for begin in range(0, size, _IN_CACHE):
            end = min(begin + _IN_CACHE, size)
            there[begin:end] = source[begin:end]
            if digest is not None:
                digest.take(target[begin:end])
    else:
        target[:size].copy_(part)
        if digest is not None:
            digest.take(target[:size])


@lru_cache(maxsize=64)
def dtype_name(dtype: torch.dtype) -> str:
    """Raises ValueError for a dtype that cannot be sent."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"tensors of dtype {name} cannot be sent (possible: {', '.join(sorted(DTYPES))})")
    return name


class Unpacker:
    """Reads buckets back into tensors, in the order in which they were packed."""

    def __init__(self, intake: Intake | None = None) -> None:
        self._intake = intake or Intake()
        self._partial: _Partial | None = None
        self._names: set[str] = set()
        self.tensors = 0
        self.bytes = 0

    def read(self, bucket: Tensor, groups: Sequence[Any]) -> Iterator[Arrival]:
        """Yield the tensors that are complete with this bucket, or with this part of it.

        Raises BrokenMessage for a description that does not match the bucket or the previous content.
        """
        for group in groups:
            begin, text = group if isinstance(group, list) and len(group) == 2 else (None, None)
            if type(begin) is not int or not 0 <= begin < _MOST or begin % ROW or not isinstance(text, str):
                raise BrokenMessage(f"the description of tensors is {str(group)[:200]}")
            entries, start, length = _parse(text)
            if begin + length > bucket.numel():
                name, end = entries[-1].name, begin + length
                raise BrokenMessage(f"the tensor {name!r} lies up to byte {end} of a bucket of {bucket.numel()}")
            size = entries[-1].begin + entries[-1].size
            if start == 0 and length == size and self._partial is None:
                yield from self._together(Packed(bucket[begin : begin + length], entries))
            elif (whole := self._piece(entries[0], start, bucket, begin, length)) is not None:
                yield self._arrival([(entries[0].name, whole)], entries)

    def finish(self, tensors: int, size: int) -> None:
        """Raise BrokenMessage unless tensors and bytes equal the sender's counts."""
        if self._partial is not None:
            raise BrokenMessage(f"the end came in the middle of {self._partial.entry.name!r}")
        if (self.tensors, self.bytes) != (tensors, size):
            raise BrokenMessage(
                f"{self.tensors} tensors with {self.bytes} bytes came, the sender counted {tensors} with {size}"
            )

    def _arrival(self, tensors: Iterable[NamedTensor], entries: Sequence[Entry]) -> Arrival:
        size, names = sum([entry.size for entry in entries]), [entry.name for entry in entries]
        known = self._names.intersection(names)
        self._names.update(names)
        self.tensors += len(entries)
        self.bytes += size
        if len(self._names) != self.tensors:
            twice = min(known or {name for name in names if names.count(name) > 1})
            raise BrokenMessage(f"the tensor {twice!r} comes twice")
        return Arrival(tensors, len(entries), size)

    def _together(self, packed: Packed) -> Iterator[Arrival]:
        """Yield complete tensors; in host memory, digest and copy each while it is in the cache."""
        data, entries, intake = packed.data, packed.entries, self._intake
        if data.is_cpu and intake.targets:
            found: list[NamedTensor] = []
            self._digest(data, packed.into(intake.targets, found))
            if intake.copy:
                found = [(name, one if one is intake.targets.get(name) else one.clone()) for name, one in found]
            yield self._arrival(found, entries)
        else:
            for begin, some in _chunks(entries) if data.is_cpu else [(0, entries)]:
                yield self._chunk(data[begin : begin + some[-1].begin + some[-1].size], some)

    def _chunk(self, data: Tensor, entries: Sequence[Entry]) -> Arrival:
        """Take the tensors of one chunk, which fits into a core's cache. With `copy` they share an allocation."""
        if not self._intake.copy:
            self._digest(data, entries)
            return self._arrival(Packed(data, entries), entries)
        own = torch.empty_like(data)
        if data.is_cpu:
            self._digest(own, place(Packed(data, entries), entries, own))
        else:
            self._digest(own.copy_(data), entries)
        return self._arrival(Packed(own, entries), entries)

    def _digest(self, data: Tensor, entries: Iterable[Entry]) -> None:
        if self._intake.digest is not None:
            self._intake.digest.add_packed(data, entries)
        else:
            for _ in entries:
                pass

    def _piece(self, entry: Entry, start: int, bucket: Tensor, begin: int, length: int) -> Tensor | None:
        """Add one piece of a tensor that is sent in pieces; return the tensor after the last piece."""
        if self._partial is None and start == 0 and 0 < length < entry.size:
            self._partial = _Partial(entry, bucket, begin, self._intake)
        if self._partial is None or self._partial.entry != entry or self._partial.come != start or length == 0:
            raise BrokenMessage(f"a piece of {entry.name!r} from byte {start} comes where another was due")
        whole = self._partial.add(bucket, begin, length)
        if self._partial.come < entry.size:
            return None
        self._partial = None
        return whole


@lru_cache(maxsize=REMEMBERED)
def _chunks(entries: tuple[Entry, ...]) -> list[tuple[int, tuple[Entry, ...]]]:
    """Cut entries into chunks: the start of each chunk, and its entries relative to that start."""
    chunks: list[list[Entry]] = []
    for entry in entries:
        if not chunks or entry.begin + entry.size > chunks[-1][0].begin + _IN_CACHE:
            chunks.append([])
        chunks[-1].append(entry)
    return [(some[0].begin, tuple(one._replace(begin=one.begin - some[0].begin) for one in some)) for some in chunks]


class _Partial:
    """A tensor that is sent in pieces: parts of one bucket, or several buckets if it is larger than one."""

    def __init__(self, entry: Entry, bucket: Tensor, begin: int, intake: Intake) -> None:
        self.entry = entry
        self.come = 0  # bytes
        self._digest = None if intake.digest is None else intake.digest.open(*entry[:3], bucket.device)
        self._stays = False  # the tensor can be used in the bucket
        target = intake.targets.get(entry.name)
        if target is not None and bucket.is_cpu and is_like(target, entry):
            self._tensor = target
        elif intake.copy or begin + entry.size > bucket.numel():
            self._tensor = torch.empty(entry.shape, dtype=entry.dtype, device=bucket.device)
        else:
            self._tensor = bucket[begin : begin + entry.size].view(entry.dtype).view(entry.shape)
            self._stays = True
        self._bytes = flat(self._tensor)

    def add(self, bucket: Tensor, begin: int, length: int) -> Tensor:
        """Add a piece; return the tensor, complete after the last one. Raises BrokenMessage if pieces do not join."""
        part, there = bucket[begin : begin + length], self._bytes[self.come : self.come + length]
        if not self._stays:
            _take(part, there, self._digest)
        elif part.data_ptr() != there.data_ptr():
            raise BrokenMessage(f"a piece of {self.entry.name!r} lies apart from the one before")
        elif self._digest is not None:
            self._digest.take(part)
        self.come += length
        return self._tensor


@lru_cache(maxsize=REMEMBERED)
def _describe(entries: tuple[Entry, ...], start: int, length: int) -> str:
    """Describe a group as text: [[name, dtype, shape]*, start, length of the piece], in bytes.

    Raises ValueError for a name or dtype that cannot be sent.
    """
    longest = max(entries, key=lambda one: len(one.name))
    if len(longest.name) > LONGEST_NAME:
        raise ValueError(f"a weight's name has {len(longest.name)} characters; the longest is {LONGEST_NAME}")
    return json.dumps([[[one.name, dtype_name(one.dtype), one.shape] for one in entries], start, length])


@lru_cache(maxsize=REMEMBERED)
def _parse(text: str) -> tuple[tuple[Entry, ...], int, int]:
    """Parse the text of `_describe`. Raises BrokenMessage for an invalid text."""
    try:
        tensors, start, length = json.loads(text)
        entries = layout(tuple([_checked(*one) for one in tensors]))
    except (ValueError, TypeError) as error:
        raise BrokenMessage(f"the description of tensors is {text[:200]}") from error
    if not entries or not all(type(x) is int and 0 <= x < _MOST for x in (start, length)):
        raise BrokenMessage(f"the description of tensors is {text[:200]}")
    size = entries[-1].begin + entries[-1].size
    if start + length > size or (len(entries) > 1 and length != size):
        raise BrokenMessage(f"of {entries[-1].name!r} and others, {size} bytes, came {start}..{start + length}")
    return entries, start, length


def _checked(name: Any, dtype: Any, shape: Any) -> tuple[str, torch.dtype, tuple[int, ...]]:
    """Check name, dtype and shape of a tensor. Raises BrokenMessage if one is invalid."""
    sizes = shape if isinstance(shape, list) else [None]
    sane = all(type(x) is int and 0 <= x < _MOST for x in sizes)
    if not isinstance(name, str) or len(name) > LONGEST_NAME or not isinstance(dtype, str) or not sane:
        raise BrokenMessage(f"the description of a tensor is {str([name, dtype, shape])[:200]}")
    known = DTYPES.get(dtype)
    if known is None:
        raise BrokenMessage(f"the tensor {name!r} has the unknown dtype {dtype[:40]!r}")
    return name, known, tuple(sizes)
