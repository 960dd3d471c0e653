"""The part of each weight that a rank holds, read from its DTensor, and gathering and placing whole weights.

Inner dimensions of a mesh (tensor or expert parallel) cut a weight first, then outer ones (`fully_shard`), each into
runs along one dimension. A few weights (fused gate and up matrices under tensor parallelism) consist of several pieces.
Names of dimensions do not matter, so meshes of other packages are read too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hone.engines.base import Ranks
from hone.engines.parts import Piece

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
BUCKET_BYTES = 128 * 2**20  # per collective
Runs = list[tuple[int, int]]  # [start, stop) in the whole tensor, in local order


@dataclass(frozen=True, slots=True)
class _Cut:
    """Cut of a weight over one dimension of the mesh."""

    dim: int  # of the tensor
    group: Any
    size: int
    rank: int
    factor: int  # the dimension consists of `factor` blocks, each cut separately


@dataclass(frozen=True, slots=True)
class MeshShard:
    """Distribution of one weight over a mesh (a `parts.Shard`); without cuts, every rank holds all of it."""

    shape: tuple[int, ...]
    cuts: tuple[_Cut, ...]  # in the order in which they were made
    copies: int  # ranks that hold the same part
    is_owner: bool  # whether this rank is the first of these

    @classmethod
    def of(cls, weight: Tensor, ranks: Ranks) -> MeshShard:
        """Read the distribution of a weight over any mesh of all ranks; every rank holds all of a plain tensor."""
        cuts = _cuts_of(weight) if isinstance(weight, DTensor) else []
        parts = math.prod(cut.size for cut in cuts)
        # ranks that hold the same part differ in other dimensions of the mesh; the first has a zero in each of those
        first = sum(ranks.rank - dist.get_process_group_ranks(cut.group)[0] for cut in cuts)
        return cls(tuple(weight.shape), tuple(cuts), ranks.world // parts, ranks.rank == first)

    def pieces(self) -> list[Piece]:
        """The pieces that this rank holds."""
        runs: list[Runs] = [[(0, length)] for length in self.shape]
        for cut in self.cuts:
            runs[cut.dim] = _cut_runs(runs[cut.dim], cut)
        found = []
        for box in itertools.product(*(_placed(one) for one in runs)):
            offset = tuple(start for start, _, _ in box)
            shape = tuple(stop - start for start, stop, _ in box)
            if 0 not in shape:
                found.append(
                    Piece(offset, shape, tuple(slice(at, at + n) for (_, _, at), n in zip(box, shape, strict=True)))
                )
        return found

    def local_shape(self) -> list[int]:
        return self.lengths(len(self.cuts))

    def lengths(self, after: int) -> list[int]:
        """The local shape after the first `after` cuts."""
        runs: list[Runs] = [[(0, length)] for length in self.shape]
        for cut in self.cuts[:after]:
            runs[cut.dim] = _cut_runs(runs[cut.dim], cut)
        return [sum(stop - start for start, stop in one) for one in runs]


def _cuts_of(weight: DTensor) -> list[_Cut]:
    """The cuts of a weight, in the order in which they were made."""
    mesh, cuts = weight.device_mesh, list[_Cut]()
    for index, placement in reversed(list(enumerate(weight.placements))):
        if not isinstance(placement, Shard | _StridedShard):
            continue
        dim, factor = placement.dim % weight.ndim, getattr(placement, "split_factor", 1)
        inner = math.prod(cut.size for cut in cuts if cut.dim == dim)
        # torch marks a cut of parts that inner dimensions have cut before as strided; each part is cut plainly
        strided = factor > 1 and factor % inner == 0
        group, rank = mesh.get_group(index), mesh.get_local_rank(index)
        cut = _Cut(dim, group, mesh.size(index), rank, factor // inner if strided else 1)
        cuts.insert(len(cuts) if strided or inner == 1 else 0, cut)
    return cuts


def _placed(runs: Runs) -> list[tuple[int, int, int]]:
    """Runs, each with its local start."""
    ends = itertools.accumulate((stop - start for start, stop in runs), initial=0)
    return [(start, stop, at) for (start, stop), at in zip(runs, ends, strict=False)]


def _cut_runs(runs: Runs, cut: _Cut) -> Runs:
    length = sum(stop - start for start, stop in runs) // cut.factor
    step = -(-length // cut.size)
    first, last = min(cut.rank * step, length), min((cut.rank + 1) * step, length)
    return [one for block in range(cut.factor) for one in _between(runs, block * length + first, block * length + last)]


def _between(runs: Runs, first: int, last: int) -> Runs:
    """The part [first, last) of runs laid end to end."""
    found: Runs = []
    for start, stop, at in _placed(runs):
        low, high = max(first - at, 0), min(last - at, stop - start)
        if low < high:
            found.append((start + low, start + high))
    return found


# ------------------------------------------------------------------------------------------------------- gathering


MeshPart = tuple[str, Tensor, MeshShard]
"""A name, this rank's live tensor, and the part of the whole tensor that it is."""


def gather(named: Iterable[MeshPart], bucket_bytes: int = BUCKET_BYTES) -> Iterator[tuple[str, Tensor]]:
    """Gather whole tensors in order, bucket by bucket; the tensors of a bucket share each collective.

    Every rank must consume every tensor. The extra memory is one bucket (or one larger tensor) plus the tensor made
    from it.
    """
    bucket: list[MeshPart] = []
    held = 0
    for one in named:
        _, local, shard = one
        size = math.prod(shard.shape) * local.element_size()
        if bucket and (held + size > bucket_bytes or not _together(bucket[0][2], shard)):
            yield from _gather_bucket(bucket)
            bucket, held = [], 0
        bucket.append(one)
        held += size
    if bucket:
        yield from _gather_bucket(bucket)


def _together(one: MeshShard, other: MeshShard) -> bool:
    return [cut.group for cut in one.cuts] == [cut.group for cut in other.cuts]


def _gather_bucket(bucket: list[MeshPart]) -> Iterator[tuple[str, Tensor]]:
    tensors: Iterable[Tensor] = [local for _, local, _ in bucket]
    shards = [shard for _, _, shard in bucket]
    for number in reversed(range(len(shards[0].cuts))):
        cuts = [shard.cuts[number] for shard in shards]
        lengths = [shard.lengths(number)[cut.dim] for shard, cut in zip(shards, cuts, strict=True)]
        tensors = _join_all(list(tensors), cuts, lengths)
    for (name, local, _), tensor in zip(bucket, tensors, strict=True):
        yield name, tensor.clone() if tensor is local else tensor


def _join_all(tensors: list[Tensor], cuts: list[_Cut], lengths: list[int]) -> Iterator[Tensor]:
    """Undo one cut of several tensors with one all-gather; `lengths` are the cut dimensions' lengths before the cut.

    Yields one tensor at a time, so memory holds the bucket and one tensor.
    """
    if cuts[0].size == 1:
        yield from tensors
        return
    padded = [_padded(*one) for one in zip(tensors, cuts, lengths, strict=True)]
    flat = torch.cat([one.reshape(-1).view(torch.uint8) for one in padded])
    kinds = [(one.dtype, one.shape, one.numel() * one.element_size()) for one in padded]
    del padded
    parts = flat.new_empty(cuts[0].size, len(flat))
    _all_gather(parts.view(-1), flat, group=cuts[0].group)  # one tensor, because backends copy a list
    del flat
    at = 0
    for (dtype, shape, size), cut, length in zip(kinds, cuts, lengths, strict=True):
        theirs = [part[at : at + size].clone().view(dtype).view(shape) for part in parts]
        at += size
        yield _joined(theirs, cut, length)


def _padded(tensor: Tensor, cut: _Cut, length: int) -> Tensor:
    """Pad the cut dimension to the longest rank's length."""
    want = cut.factor * -(-(length // cut.factor) // cut.size)
    missing = want - tensor.shape[cut.dim]
    if not missing:
        return tensor.contiguous()
    shape = list(tensor.shape)
    shape[cut.dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], cut.dim)


def _joined(parts: list[Tensor], cut: _Cut, length: int) -> Tensor:
    if cut.factor == 1:
        return torch.cat(parts, cut.dim).narrow(cut.dim, 0, length).contiguous()
    blocks = [part.chunk(cut.factor, cut.dim) for part in parts]
    return torch.cat([one[block] for block in range(cut.factor) for one in blocks], cut.dim).contiguous()


def whole_weight(name: str, weight: Tensor, ranks: Ranks) -> Tensor:
    """Gather one weight of a sharded model. Every rank calls it."""
    return next(gather([(name, local_part(weight.detach()), MeshShard.of(weight.detach(), ranks))]))[1]


def local_part(tensor: Tensor) -> Tensor:
    """A DTensor's local tensor, sharing its memory; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def place(empty: Tensor, value: Tensor, trained: bool, device: str, ranks: Ranks) -> nn.Parameter:
    """Put this rank's part of a whole tensor where an empty one is (see `parts.PlaceFn`)."""
    if not isinstance(empty, DTensor):
        return nn.Parameter(value.to(device, copy=True), requires_grad=trained)
    made: Any = torch.empty_like(empty, device=device)
    fill(made, value, ranks)
    return nn.Parameter(made, requires_grad=trained)


@torch.no_grad()
def fill(weight: Tensor, value: Tensor, ranks: Ranks) -> None:
    """Copy this rank's part of a whole tensor into a weight."""
    local = local_part(weight)
    for piece in MeshShard.of(weight, ranks).pieces():
        there = tuple(slice(start, start + length) for start, length in zip(piece.offset, piece.shape, strict=True))
        local[piece.at] = value[there].to(local.device)
