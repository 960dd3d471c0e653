"""Boxes of tensors: [start, stop) in each dimension. The ranks of a rollout server each need one of every weight.

BoxMap: name -> (shape of the whole tensor, box)      a tensor that is not in a map is meant whole
text:   the same as JSON, compressed; the same map always gives the same text
"""

from __future__ import annotations

import base64
import binascii
import itertools
import json
import math
import zlib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

Box = tuple[tuple[int, int], ...]
LARGEST_TEXT = 1 << 25  # bytes of a map's JSON
_MOST = 1 << 48  # limit of any length


class BoxError(ValueError):
    """A text is no map of boxes, or a tensor has another shape than its map says."""


class Boxed(NamedTuple):
    """A box of a tensor."""

    shape: tuple[int, ...]  # of the whole tensor
    box: Box

    @property
    def is_whole(self) -> bool:
        return self.box == whole(self.shape)

    def of(self, name: str, tensor: Tensor) -> Tensor:
        """Return the box of a whole tensor, as a view. Raises BoxError for a tensor of another shape."""
        if tuple(tensor.shape) != self.shape:
            raise BoxError(f"{name} is {list(tensor.shape)}, its receivers know it as {list(self.shape)}")
        return narrowed(tensor, self.box)


BoxMap = Mapping[str, Boxed]


def whole(shape: Iterable[int]) -> Box:
    return tuple((0, length) for length in shape)


def nothing(shape: Iterable[int]) -> Box:
    """The empty box. A scalar has none: it is always whole."""
    return tuple((0, 0) for _ in shape)


def lengths(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def is_empty(box: Box) -> bool:
    return 0 in lengths(box)


def hull(one: Box, other: Box) -> Box:
    """The smallest box that contains both."""
    if is_empty(one):
        return other
    if is_empty(other):
        return one
    return tuple((min(a, c), max(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))


def around(some: Iterable[Boxed]) -> Boxed:
    """The smallest box around boxes of one tensor; all of it if they disagree about its shape."""
    first, *others = some
    box = first.box
    for other in others:
        box = hull(box, other.box) if other.shape == first.shape else whole(first.shape)
    return Boxed(first.shape, box)


def overlap(one: Box, other: Box) -> Box | None:
    """The box that both have; None: there is none."""
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return None if any(start >= stop for start, stop in found) else found


def contains(outer: Box, inner: Box) -> bool:
    return is_empty(inner) or all(a <= c and d <= b for (a, b), (c, d) in zip(outer, inner, strict=True))


def narrowed(tensor: Tensor, box: Box, begin: Box = ()) -> Tensor:
    """A view of `box` in a tensor that begins at the start of the box `begin`, or at 0."""
    origin = [start for start, _ in begin] or [0] * len(box)
    for dim, ((start, stop), first) in enumerate(zip(box, origin, strict=True)):
        if (start - first, stop - start) != (0, tensor.shape[dim]):
            tensor = tensor.narrow(dim, start - first, stop - start)
    return tensor


@lru_cache(maxsize=1 << 12)  # layers of a model are cut alike
def cover(shape: tuple[int, ...], boxes: frozenset[Box]) -> bool:
    """Return whether boxes together contain every element of a tensor."""
    if whole(shape) in boxes:
        return True
    cuts = [sorted({0, length, *(end for box in boxes for end in box[dim])}) for dim, length in enumerate(shape)]
    cells = itertools.product(*(itertools.pairwise(ends) for ends in cuts))
    return all(any(contains(box, cell) for box in boxes) for cell in cells)


# ------------------------------------------------------------------------------------------------------------ texts


def to_text(boxes: BoxMap) -> str:
    """Write a map as text; empty if every tensor is whole."""
    names: dict[Boxed, list[str]] = {}
    for name in sorted(boxes):
        if not boxes[name].is_whole:
            names.setdefault(boxes[name], []).append(name)
    if not names:
        return ""
    found = json.dumps([[one.shape, one.box, some] for one, some in names.items()], separators=(",", ":"))
    return base64.b64encode(zlib.compress(found.encode())).decode()


@lru_cache(maxsize=64)  # every sync has the same maps
def from_text(text: str) -> BoxMap:
    """Read the text of a map. Raises BoxError if it is none."""
    if not text:
        return {}
    try:
        reader = zlib.decompressobj()
        found = reader.decompress(base64.b64decode(text, validate=True), LARGEST_TEXT)
        groups = json.loads(found)
        return {name: _checked(shape, box) for shape, box, names in groups for name in _names(names)}
    except (ValueError, TypeError, zlib.error, binascii.Error, RecursionError) as error:
        raise BoxError(f"a map of boxes cannot be read: {text[:80]!r}") from error


def _names(given: Any) -> list[str]:
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise ValueError(given)
    return given


def _checked(shape: Any, box: Any) -> Boxed:
    ends = [(0, length) for length in shape]
    found = tuple((start, stop) for start, stop in box)
    sane = all(type(x) is int and 0 <= x < _MOST for x in (*shape, *itertools.chain(*found)))
    if not sane or len(ends) != len(found) or not all(a <= b <= n for (a, b), (_, n) in zip(found, ends, strict=True)):
        raise ValueError(box)
    return Boxed(tuple(shape), found)


def size(boxed: Boxed) -> int:
    """Elements in the box."""
    return math.prod(lengths(boxed.box))


__all__ = [
    "Box",
    "BoxError",
    "BoxMap",
    "Boxed",
    "around",
    "contains",
    "cover",
    "from_text",
    "hull",
    "is_empty",
    "lengths",
    "narrowed",
    "nothing",
    "overlap",
    "size",
    "to_text",
    "whole",
]
