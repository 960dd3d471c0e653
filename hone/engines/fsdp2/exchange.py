"""Exchange the boxes of weights that ranks need, instead of gathering whole tensors on every rank.

    rank 0  holds rows 0..3, needs columns 0..1      rank 0 --rows 0..3 of columns 2..3--> rank 1
    rank 1  holds rows 4..7, needs columns 2..3      rank 1 --rows 4..7 of columns 0..1--> rank 0

Every rank knows what all ranks hold (asked once) and need, so all plan the same transfers. A rank takes what it holds
itself; of ranks that hold the same part, each sends to other ranks. All weights of a bucket share one all-to-all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hone.engines.fsdp2.shards import BUCKET_BYTES, MeshPart
from hone.models.parts.boxes import Box, Boxed, BoxMap, is_empty, lengths, narrowed, overlap

Held = tuple[tuple[Box, tuple[int, ...]], ...]
"""The boxes that the ranks hold of one weight, and who holds each."""


class Move(NamedTuple):
    """A box that one rank gives to another, or keeps."""

    source: int
    target: int
    box: Box
    held: Box  # it is a part of this one


def everyones_boxes(parts: Iterable[MeshPart]) -> dict[str, Held]:
    """Return the boxes of each weight on every rank. Every rank calls it."""
    named = list(parts)
    own = {name: [[*zip(one.offset, one.shape, strict=True)] for one in shard.pieces()] for name, _, shard in named}
    found: dict[str, dict[Box, list[int]]] = {name: {} for name in own}
    for rank, text in enumerate(_texts(json.dumps(own), named[0][1].device)):
        for name, boxes in json.loads(text).items():
            for box in boxes:
                ends = tuple((start, start + length) for start, length in box)
                found[name].setdefault(ends, []).append(rank)
    return {name: tuple((box, tuple(ranks)) for box, ranks in held.items()) for name, held in found.items()}


def _texts(text: str, device: torch.device) -> list[str]:
    """The texts of all ranks."""
    own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(own)], device=device))
    counts = [int(one) for one in sizes]
    there = [own.new_zeros(max(counts)) for _ in counts]
    dist.all_gather(there, torch.cat([own, own.new_zeros(max(counts) - len(own))]))
    return [bytes(one[:count].tolist()).decode() for one, count in zip(there, counts, strict=True)]


@lru_cache(maxsize=1 << 10)  # layers are cut alike
def moves(held: Held, needed: tuple[Box, ...]) -> tuple[Move, ...]:
    """Plan the moves between ranks; `needed` is the box of each rank."""
    found = []
    for target, box in enumerate(needed):
        for there, ranks in held if not is_empty(box) else ():
            part = overlap(there, box)
            if part is not None:
                source = target if target in ranks else ranks[target % len(ranks)]
                found.append(Move(source, target, part, there))
    return tuple(found)


def exchange(
    parts: Iterable[MeshPart], held: Mapping[str, Held], needs: Sequence[BoxMap], bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, Tensor, Boxed]]:
    """Yield every weight's name with the box of it that this rank needs, and which box that is.

    `needs` are of every rank, and name every weight. Every rank must consume everything. The extra memory is what this
    rank gives and gets of one bucket (or of one larger tensor), and one box made from it.
    """
    bucket: list[MeshPart] = []
    total = 0
    for one in parts:
        _, local, shard = one
        length = math.prod(shard.shape) * local.element_size()
        if bucket and (total + length > bucket_bytes or local.dtype != bucket[0][1].dtype):
            yield from _exchange_bucket(bucket, held, needs)
            bucket, total = [], 0
        bucket.append(one)
        total += length
    if bucket:
        yield from _exchange_bucket(bucket, held, needs)


def _exchange_bucket(
    bucket: Sequence[MeshPart], held: Mapping[str, Held], needs: Sequence[BoxMap]
) -> Iterator[tuple[str, Tensor, Boxed]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    planned = [moves(held[name], tuple(need[name].box for need in needs)) for name, _, _ in bucket]
    given: list[list[Tensor]] = [[] for _ in range(world)]
    awaited = [0] * world  # elements
    for (_, local, shard), some in zip(bucket, planned, strict=True):
        at = {_ends(piece.offset, piece.shape): piece.at for piece in shard.pieces()}
        for move in some:
            if move.source == rank != move.target:
                given[move.target].append(narrowed(local[at[move.held]], move.box, move.held).reshape(-1))
            elif move.target == rank != move.source:
                awaited[move.source] += math.prod(lengths(move.box))
    came = _all_to_all([one for some in given for one in some], [_count(some) for some in given], awaited, bucket[0][1])
    del given
    begins = [sum(awaited[:source]) for source in range(world)]
    for (name, local, shard), some in zip(bucket, planned, strict=True):
        mine = needs[rank][name]
        at = {_ends(piece.offset, piece.shape): piece.at for piece in shard.pieces()}
        made = torch.empty(lengths(mine.box), dtype=local.dtype, device=local.device)
        for move in (move for move in some if move.target == rank):
            there = narrowed(made, move.box, mine.box)
            if move.source == rank:
                there.copy_(narrowed(local[at[move.held]], move.box, move.held))
            else:
                end = begins[move.source] + math.prod(lengths(move.box))
                there.copy_(came[begins[move.source] : end].view(lengths(move.box)))
                begins[move.source] = end
        yield name, made, mine


def _all_to_all(given: list[Tensor], counts: list[int], awaited: list[int], like: Tensor) -> Tensor:
    """Send `given` to the ranks in turn, so many elements to each; return what comes, in the order of the ranks."""
    width = like.element_size()
    sent = torch.cat([one.view(torch.uint8) for one in given]) if given else like.new_empty(0, dtype=torch.uint8)
    came = torch.empty(sum(awaited) * width, dtype=torch.uint8, device=like.device)
    dist.all_to_all_single(came, sent, [one * width for one in awaited], [one * width for one in counts])
    return came.view(like.dtype)


def _count(tensors: Iterable[Tensor]) -> int:
    return sum(one.numel() for one in tensors)


def _ends(offset: Sequence[int], shape: Sequence[int]) -> Box:
    return tuple((start, start + length) for start, length in zip(offset, shape, strict=True))


__all__ = ["Held", "Move", "everyones_boxes", "exchange", "moves"]
