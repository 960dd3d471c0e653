"""Sends a `Batch` from a Ray driver to the ranks, each tensor once.

    driver:  batch --plan--> BatchPlan + references to arrays in the object store    (one `put` for each tensor)
    rank:    BatchPlan + arrays --unpack--> its own sequences

A mini-batch is a selection of the collected batch (`Batch.origin`), whose arrays are in the object store already: its
plan names sequences of the whole batch, and only tensors that were added since then are sent. Values that only ranks
read, such as the reference's hidden states, stay where they were computed; the driver holds a `Distant` instead.

This is not an encoding: Ray moves the arrays, and shares their memory on one machine. Results come back by the same
`to_array`; `split.py` has the encoding of results under torchrun, where there is no object store.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hone.data.packing import Key, assembled, columns, select, token_positions, with_columns
from hone.types import COLUMNS, Axis, Batch, BatchImages

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Arrays = dict[str, tuple[np.ndarray, str]]
"""Name -> (array, torch's name of the dtype, which NumPy may not have)."""
IMAGES = "images"  # in the place of a field in a `Key`: the name is a field of `BatchImages`
STAYING = frozenset({"states"})
"""Keys of `ModelOutput.extras` that only ranks read. They are large, [T, H], so they are not sent to the driver."""


def to_array(tensor: Tensor) -> tuple[np.ndarray, str]:
    """A tensor's memory as an array: of integers of the same size where NumPy has no such dtype (bfloat16)."""
    tensor = tensor.detach().cpu().contiguous()
    name = str(tensor.dtype).removeprefix("torch.")
    return (tensor if hasattr(np, name) else tensor.view(_INTEGERS[tensor.element_size()])).numpy(), name


def to_tensor(array: np.ndarray, dtype: str) -> Tensor:
    """The tensor that `to_array` took, as a view. The memory may be shared and read-only: never write into it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        tensor = torch.from_numpy(array)
    wanted: torch.dtype = getattr(torch, dtype)
    return tensor if tensor.dtype == wanted else tensor.view(wanted)


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of some sequences, in this order, in the object store of the rank that computed them."""

    reference: Any  # of the transport
    dtype: str
    sequences: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Distant:
    """The driver's stand-in for per-token values [T, ...] that stay with the ranks.

    It can be cut like a tensor; a cut has no pieces of its own: ranks take pieces of the whole batch.
    """

    tokens: int
    pieces: tuple[Piece, ...] = ()

    @property
    def shape(self) -> tuple[int]:
        return (self.tokens,)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def index_select(self, dim: int, at: Tensor) -> Distant:
        return Distant(len(at))


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Replaces a `Batch` among the arguments of a call; its arrays are sent as further arguments, the base's first."""

    base: tuple[tuple[Key, str], ...]  # of the batch, or of the whole that it was selected from: key, dtype
    parts: tuple[tuple[int, ...], ...]  # which sequences of the base are whose, by data-parallel rank
    distant: tuple[tuple[Key, tuple[Piece, ...]], ...] = ()
    added: tuple[tuple[Key, str], ...] = ()  # set since the selection; cut by the places within it
    chosen: tuple[int, ...] = ()  # the selection
    places: tuple[tuple[int, ...], ...] = ()  # as `parts`, in the selection's own numbers


@dataclass(frozen=True, slots=True)
class TensorsPlan:
    """Replaces named tensors among the arguments of a call, which go whole to every rank."""

    keys: tuple[tuple[str, str], ...]  # name, dtype


PutFn = Callable[[Tensor], tuple[Any, str]]
"""(reference to a tensor's array in the store, torch's name of the dtype); the same one while the tensor lives."""


def plan(batch: Batch, parts: Sequence[Sequence[int]], put: PutFn) -> tuple[BatchPlan, list[Any]]:
    """Plan the way of the sequences of `parts` to their ranks, with references to the arrays that they need."""
    origin = batch.origin
    if origin is None or batch.cu_seqlens is not origin.part.cu_seqlens or batch.images is not origin.part.images:
        return _planned(batch, parts, put)
    before, whole = dict(_values(origin.part)), dict(_values(origin.whole))
    now = dict(_values(batch))
    added = {key: value for key, value in now.items() if before.get(key) is not value}
    kept = {key: value for key, value in whole.items() if key in now and key not in added}
    composed = [[origin.indices[i] for i in part] for part in parts]
    base, references = _sent(_tensors(kept), put)
    new, more = _sent(added, put)
    distant = _distant(kept)
    return (
        BatchPlan(base, _frozen(composed), distant, new, tuple(origin.indices), _frozen(parts)),
        references + more,
    )


def plan_tensors(tensors: Mapping[str, Tensor], put: PutFn) -> tuple[TensorsPlan, list[Any]]:
    """The plan of named tensors, and references to their arrays."""
    placed = {name: put(tensor) for name, tensor in tensors.items()}
    keys = tuple((name, dtype) for name, (_, dtype) in placed.items())
    return TensorsPlan(keys), [reference for reference, _ in placed.values()]


def _planned(batch: Batch, parts: Sequence[Sequence[int]], put: PutFn) -> tuple[BatchPlan, list[Any]]:
    values = dict(_values(batch))
    base, references = _sent(_tensors(values), put)
    return BatchPlan(base, _frozen(parts), _distant(values)), references


def _frozen(parts: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, parts))


def _sent(values: Mapping[Key, Any], put: PutFn) -> tuple[tuple[tuple[Key, str], ...], list[Any]]:
    placed = {key: put(value) for key, value in values.items()}
    return tuple((key, dtype) for key, (_, dtype) in placed.items()), [reference for reference, _ in placed.values()]


def _tensors(values: Mapping[Key, Any]) -> dict[Key, Any]:
    return {key: value for key, value in values.items() if not isinstance(value, Distant)}


def _distant(values: Mapping[Key, Any]) -> tuple[tuple[Key, tuple[Piece, ...]], ...]:
    return tuple((key, value.pieces) for key, value in values.items() if isinstance(value, Distant))


def _values(batch: Batch) -> Iterator[tuple[Key, Any]]:
    yield from ((key, value) for key, _, value in columns(batch))
    if batch.images is not None:
        yield from (((IMAGES, one.name), getattr(batch.images, one.name)) for one in fields(batch.images))


# ------------------------------------------------------------------------------------------------------ on the ranks


def unpack_tensors(plan: TensorsPlan, arrays: Iterator[np.ndarray]) -> dict[str, Tensor]:
    """The named tensors; their memory is shared with other ranks."""
    return {name: to_tensor(next(arrays), dtype) for name, dtype in plan.keys}


def unpack(plan: BatchPlan, arrays: Iterator[np.ndarray], rank: int, fetch: Callable[[Any], np.ndarray]) -> Batch:
    """A data-parallel rank's sequences of a batch, in memory of their own; `fetch` gets a piece's array."""
    values = {key: to_tensor(next(arrays), dtype) for key, dtype in plan.base}
    whole = _batch(values)
    own = select(whole, plan.parts[rank])
    found = {key: _gathered(pieces, plan.parts[rank], whole.lengths, fetch) for key, pieces in plan.distant}
    if plan.added:
        lengths = whole.lengths[torch.tensor(plan.chosen, dtype=torch.int64)]
        ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        places = torch.tensor(plan.places[rank], dtype=torch.int64)
        positions = token_positions(ends, places)
        for key, dtype in plan.added:
            per_token = COLUMNS[key[0]].axis is Axis.TOKEN
            found[key] = to_tensor(next(arrays), dtype)[positions if per_token else places]
    return with_columns(own, found).with_(origin=None)


def _batch(values: Mapping[Key, Tensor]) -> Batch:
    images = {name: tensor for (field, name), tensor in values.items() if field == IMAGES}
    rest = {key: tensor for key, tensor in values.items() if key[0] != IMAGES}
    return assembled(rest, BatchImages(**images) if images else None)


def _gathered(
    pieces: Sequence[Piece], sequences: Sequence[int], lengths: Tensor, fetch: Callable[[Any], np.ndarray]
) -> Tensor:
    """The rows of `sequences`, of which each lies in one piece; only the pieces that have some are fetched."""
    where = {sequence: number for number, piece in enumerate(pieces) for sequence in piece.sequences}
    held: dict[int, tuple[Tensor, dict[int, tuple[int, int]]]] = {}
    for number in sorted({where[one] for one in sequences} or {0}):  # of none: the shape and dtype of a row
        piece = pieces[number]
        ends = lengths[torch.tensor(piece.sequences, dtype=torch.int64)].cumsum(0).tolist()
        spans = zip(piece.sequences, itertools.pairwise([0, *ends]), strict=True)
        held[number] = to_tensor(fetch(piece.reference), piece.dtype), dict(spans)
    rows = []
    for one in sequences:
        tensor, places = held[where[one]]
        start, end = places[one]
        rows.append(tensor[start:end])
    return torch.cat(rows) if rows else held[0][0][:0].clone()
