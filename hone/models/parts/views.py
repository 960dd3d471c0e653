"""A tensor for a loader, of which only a box may be here, and which records the box that the loader reads.

    narrow, slices, select, chunk, unsqueeze, transpose  -->  another `Viewed`: nothing is read
    everything else (copy_, to, arithmetic ...)                 -->  reads this view, and works on ordinary tensors

So the same code of an engine first shows what it needs of a whole tensor, and later gets no more than that. It sees
tensors of the whole shape both times. Reading outside the box is an error, never a wrong value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hone.models.parts.boxes import Box, Boxed, contains, hull, lengths, narrowed, nothing, whole

LOOKS = frozenset(
    {"__len__", "dim", "element_size", "is_contiguous", "is_floating_point", "nelement", "numel", "size", "stride"}
)
"""Methods that read a tensor's metadata only."""
NEW = -1  # a dimension of a view that the whole tensor does not have
VALUES = frozenset({"data", "T", "mT", "H", "mH"})  # attributes that are more than metadata


class OutsideBox(RuntimeError):
    """A loader read values of a tensor that did not come."""


@dataclass(slots=True)
class Reads:
    """Boxes that a loader read: of each tensor that it was given, the smallest box around everything."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    boxes: dict[str, Box] = field(default_factory=dict)  # of those that were read

    def add(self, name: str, box: Box) -> None:
        self.boxes[name] = hull(self.boxes[name], box) if name in self.boxes else box

    def map(self) -> dict[str, Boxed]:
        """The box of each tensor."""
        return {name: Boxed(shape, self.boxes.get(name, nothing(shape))) for name, shape in self.shapes.items()}


@dataclass(frozen=True, slots=True)
class Extent:
    """Extent of a view: for each dimension the one of the whole tensor (or `NEW`), and [start, stop)."""

    dims: tuple[tuple[int, int, int], ...]
    fixed: tuple[tuple[int, int], ...] = ()  # dimensions that are selected away, and the index
    dense: bool = False  # whether it has to be contiguous

    @classmethod
    def of(cls, shape: Sequence[int]) -> Extent:
        return cls(tuple((dim, 0, length) for dim, length in enumerate(shape)))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for _, start, stop in self.dims)

    def box(self) -> Box:
        """The box of the whole tensor."""
        ends = {dim: (start, stop) for dim, start, stop in self.dims if dim != NEW}
        ends |= {dim: (index, index + 1) for dim, index in self.fixed}
        return tuple(ends[dim] for dim in sorted(ends))

    def narrow(self, dim: int, start: int, length: int) -> Extent:
        which, first, _ = self.dims[dim]
        changed = which, first + start, first + start + length
        return Extent((*self.dims[:dim], changed, *self.dims[dim + 1 :]), self.fixed)

    def select(self, dim: int, index: int) -> Extent:
        which, first, _ = self.dims[dim]
        fixed = self.fixed if which == NEW else (*self.fixed, (which, first + index))
        return Extent((*self.dims[:dim], *self.dims[dim + 1 :]), fixed)

    def unsqueeze(self, dim: int) -> Extent:
        return Extent((*self.dims[:dim], (NEW, 0, 1), *self.dims[dim:]), self.fixed)

    def permute(self, order: Sequence[int]) -> Extent:
        return Extent(tuple(self.dims[dim] for dim in order), self.fixed)


class Viewed(Tensor):
    """A view of a tensor of which `part` is here, the box `boxed`."""

    weight: str  # its name
    part: Tensor
    boxed: Boxed
    window: Extent
    reads: Reads

    @staticmethod
    def __new__(cls: type[Viewed], weight: str, part: Tensor, boxed: Boxed, window: Extent, reads: Reads) -> Viewed:
        strides = (*_strides(boxed.shape), 1)  # the last one is of new dimensions
        mine = _strides(window.shape) if window.dense else tuple(strides[dim] for dim, _, _ in window.dims)
        made: Viewed = Tensor._make_wrapper_subclass(
            cls, window.shape, strides=mine, dtype=part.dtype, device=part.device
        )
        made.weight, made.part, made.boxed, made.window, made.reads = weight, part, boxed, window, reads
        return made

    def through(self, window: Extent) -> Viewed:
        """Another view of the same tensor."""
        return Viewed(self.weight, self.part, self.boxed, window, self.reads)

    def read(self) -> Tensor:
        """Read this view. Raises OutsideBox if a part of it is not here."""
        box = self.window.box()
        if 0 in self.window.shape:
            return self.part.new_empty(self.window.shape)
        self.reads.add(self.weight, box)
        if not contains(self.boxed.box, box):
            raise OutsideBox(
                f"the loader reads {list(box)} of {self.weight} {list(self.boxed.shape)}, of which only "
                f"{list(self.boxed.box)} came, because it read no more in the sync before"
            )
        found = narrowed(self.part, box, self.boxed.box)
        gone = dict(self.window.fixed)
        for dim in sorted(gone, reverse=True):
            found = found.select(dim, 0)
        left = [dim for dim in range(len(box)) if dim not in gone]
        found = found.permute([left.index(dim) for dim, _, _ in self.window.dims if dim != NEW])
        for place, (dim, _, _) in enumerate(self.window.dims):
            found = found.unsqueeze(place) if dim == NEW else found
        return found.contiguous() if self.window.dense else found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if _looks_only(func):
                return func(*args, **named)
            if args and isinstance(args[0], Viewed) and (found := _view(func, *args, **named)) is not None:
                return found
            return func(*_read(args), **{key: _read(one) for key, one in named.items()})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Whatever reaches this without `__torch_function__`, such as an operator called from C++."""
        return func(*_read(args), **{key: _read(one) for key, one in (kwargs or {}).items()})


def viewed(name: str, part: Tensor, reads: Reads, boxed: Boxed | None = None) -> Viewed:
    """Wrap a tensor for a loader; `boxed`: it is only this box of one. Raises OutsideBox if it has another shape."""
    boxed = boxed or Boxed(tuple(part.shape), whole(part.shape))
    if tuple(part.shape) != lengths(boxed.box):
        raise OutsideBox(f"{name} came as {list(part.shape)}, expected {list(boxed.box)} of {list(boxed.shape)}")
    reads.shapes[name] = boxed.shape
    return Viewed(name, part, boxed, Extent.of(boxed.shape), reads)


def _read(given: Any) -> Any:
    """Read the views in the arguments of an operation."""
    if isinstance(given, Viewed):
        return given.read()
    if isinstance(given, list | tuple):
        return type(given)(_read(one) for one in given) if type(given) in (list, tuple) else given
    return given


def _looks_only(func: Any) -> bool:
    if func.__name__ == "__get__":  # of an attribute
        return _attribute(func) not in VALUES
    return func.__name__ in LOOKS


def _attribute(func: Any) -> str:
    return getattr(getattr(func, "__self__", None), "__name__", "")


# ------------------------------------------------------------------------------------------- operations that are views


def _view(func: Any, tensor: Viewed, *args: Any, **named: Any) -> Any:
    """Do an operation that reads nothing; None: it is none of these."""
    name = _attribute(func) if func.__name__ == "__get__" else func.__name__
    make = _VIEWS.get(name)
    try:
        return None if make is None else make(tensor, *args, **named)
    except TypeError:  # arguments that only torch knows
        return None


def _narrow(tensor: Viewed, dim: int, start: Any, length: int) -> Viewed | None:
    dim, start = _at(tensor, dim), int(start)
    size = tensor.shape[dim]
    start = start + size if start < 0 else start
    if not 0 <= start <= start + length <= size:
        return None  # torch has the message
    return tensor.through(tensor.window.narrow(dim, start, length))


def _select(tensor: Viewed, dim: int, index: Any) -> Viewed | None:
    dim, size = _at(tensor, dim), tensor.shape[_at(tensor, dim)]
    index = int(index) + size if int(index) < 0 else int(index)
    return tensor.through(tensor.window.select(dim, index)) if 0 <= index < size else None


def _index(tensor: Viewed, key: Any) -> Viewed | None:
    keys = key if isinstance(key, tuple) else (key,)
    dots = [place for place, one in enumerate(keys) if one is Ellipsis]
    if len(dots) > 1 or not all(one is Ellipsis or one is None or type(one) in (int, slice) for one in keys):
        return None
    given = len(keys) - len(dots) - keys.count(None)
    if given > tensor.dim():
        return None
    if dots:
        keys = (*keys[: dots[0]], *[slice(None)] * (tensor.dim() - given), *keys[dots[0] + 1 :])
    found: Viewed | None = tensor
    dim = 0
    for one in keys:
        if found is None:
            return None
        if one is None:
            found = _unsqueeze(found, dim)
            dim += 1
        elif isinstance(one, slice):
            start, stop, step = one.indices(found.shape[dim])
            found = _narrow(found, dim, start, max(stop - start, 0)) if step == 1 else None
            dim += 1
        else:
            found = _select(found, dim, one)
    return found


def _split(tensor: Viewed, split_size: Any, dim: int = 0) -> tuple[Viewed, ...] | None:
    dim = _at(tensor, dim)
    size = tensor.shape[dim]
    sizes = split_size
    if isinstance(split_size, int):
        sizes = [min(split_size, size - start) for start in range(0, size, split_size)] if split_size > 0 else []
    if not sizes or sum(sizes) != size:
        return None
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    return tuple(
        tensor.through(tensor.window.narrow(dim, start, length)) for start, length in zip(starts, sizes, strict=True)
    )


def _chunk(tensor: Viewed, chunks: int, dim: int = 0) -> tuple[Viewed, ...] | None:
    size = tensor.shape[_at(tensor, dim)]
    return _split(tensor, max(-(-size // chunks), 1), dim) if size else None


def _unbind(tensor: Viewed, dim: int = 0) -> tuple[Viewed, ...]:
    dim = _at(tensor, dim)
    return tuple(tensor.through(tensor.window.select(dim, index)) for index in range(tensor.shape[dim]))


def _squeeze(tensor: Viewed, dim: int | None = None) -> Viewed:
    window = tensor.window
    for one in range(tensor.dim())[::-1] if dim is None else (_at(tensor, dim),):
        window = window.select(one, 0) if window.shape[one] == 1 else window
    return tensor.through(window)


def _unsqueeze(tensor: Viewed, dim: int) -> Viewed:
    if not -tensor.dim() - 1 <= dim <= tensor.dim():
        raise TypeError(dim)
    return tensor.through(tensor.window.unsqueeze(dim % (tensor.dim() + 1)))


def _iterate(tensor: Viewed) -> Iterator[Viewed]:
    return iter(_unbind(tensor))


def _transpose(tensor: Viewed, dim0: int, dim1: int) -> Viewed:
    order = list(range(tensor.dim()))
    first, second = _at(tensor, dim0), _at(tensor, dim1)
    order[first], order[second] = order[second], order[first]
    return tensor.through(tensor.window.permute(order))


def _permute(tensor: Viewed, *dims: Any) -> Viewed:
    order = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    return tensor.through(tensor.window.permute([_at(tensor, dim) for dim in order]))


def _turned(tensor: Viewed) -> Viewed | None:
    return tensor.through(tensor.window.permute(range(tensor.dim())[::-1])) if tensor.dim() <= 2 else None


def _last_two(tensor: Viewed) -> Viewed:
    return _transpose(tensor, -1, -2)


def _itself(tensor: Viewed) -> Viewed:
    return tensor.through(tensor.window)


def _to(tensor: Viewed, dtype: torch.dtype) -> Viewed | None:
    return _itself(tensor) if tensor.dtype == dtype else None


def _dense(tensor: Viewed) -> Viewed:
    return tensor.through(replace(tensor.window, dense=True))


def _at(tensor: Viewed, dim: int) -> int:
    if not isinstance(dim, int) or not -tensor.dim() <= dim < tensor.dim():
        raise TypeError(dim)
    return dim % tensor.dim()


_VIEWS: dict[str, Callable[..., Any]] = {
    "narrow": _narrow,
    "select": _select,
    "__getitem__": _index,
    "split": _split,
    "split_with_sizes": _split,
    "chunk": _chunk,
    "unbind": _unbind,
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "__iter__": _iterate,
    "transpose": _transpose,
    "swapaxes": _transpose,
    "permute": _permute,
    "t": _turned,
    "T": _turned,
    "mT": _last_two,
    "data": _itself,
    "detach": _itself,
    "contiguous": _dense,
    "to": _to,
}


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


__all__ = ["Extent", "OutsideBox", "Reads", "Viewed", "viewed"]
