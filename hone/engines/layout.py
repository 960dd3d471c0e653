"""How a micro-batch lies in the row that the model sees: what several sequences begin with is there once.

    batch       [q q q a a] [q q q b] [r r c c c]          sequences, each whole
    row         [q q q] [r r c c c] [a a] [b]              segments: prefixes and whole sequences, then the branches
                   ^------------------'----'               a branch attends to its prefix and to itself

The n answers to one prompt share its tokens: a quarter to a half of the work of a step where answers are short. The
hidden states of a shared token are the same for all who share it, so results are too, up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hone.data.packing import groups_of, microbatches, microbatches_of_groups
from hone.engines.image_rows import image_positions, row_images, shared_by_images
from hone.models.attention import Packing
from hone.models.routing import ROUTES
from hone.models.vision import RowImages
from hone.spans import cumulative, ranges
from hone.types import Batch

_SHORTEST = 4  # tokens: a shorter prefix costs more to share than to compute again


@dataclass(frozen=True, slots=True)
class Layout:
    """The row for the model, and where each token of the batch is in it."""

    token_ids: Tensor  # [R], R <= T
    position_ids: Tensor  # [R], or [R, 3] where images are shown
    packing: Packing
    where: Tensor  # [T] index into the row
    take: Tensor  # [R] index into the batch
    images: RowImages | None = None


@dataclass(frozen=True, slots=True)
class _Segment:
    start: int  # in the batch
    length: int
    parent: int | None = None  # number of the prefix's segment, before sorting


def cut_batch(batch: Batch, max_tokens: int, whole_groups: bool = False) -> list[list[int]]:
    """Micro-batches as index lists of at most `max_tokens` tokens, groups kept whole if that needs no more of them.

    With `whole_groups` no group is ever divided: for losses that compare the sequences of a group. The cap counts
    every token of every sequence, shared or not. Raises ValueError for what is longer than the cap.
    """
    if whole_groups:
        return microbatches_of_groups(batch, max_tokens)
    cut = microbatches(batch, max_tokens)
    sizes = [int(batch.lengths[group].sum()) for group in groups_of(batch)]
    if len(cut) <= 1 or len(sizes) == batch.num_sequences or max(sizes) > max_tokens:
        return cut
    whole = microbatches_of_groups(batch, max_tokens)
    return whole if len(whole) <= len(cut) else cut


def lay_out(batch: Batch) -> Layout:
    """The shortest row for a micro-batch; sequences share a prefix within their group (`batch.group_index`)."""
    segments, members = _segments(batch)
    order = sorted(range(len(segments)), key=lambda i: _shape(segments, i))
    place = {segment: position for position, segment in enumerate(order)}
    ordered = [segments[i] for i in order]
    lengths = [segment.length for segment in ordered]
    device = batch.token_ids.device
    take = ranges(torch.tensor([segment.start for segment in ordered]), torch.tensor(lengths)).to(device)
    cu_seqlens = cumulative(torch.tensor(lengths)).to(device)
    begins = cu_seqlens.tolist()
    pieces = [(begins[place[s]], segments[s].length) for sequence in members for s in sequence]
    packing = Packing.of(cu_seqlens, [None if s.parent is None else place[s.parent] for s in ordered])
    where = ranges(*torch.tensor(pieces).T).to(device)
    positions, images = batch.position_ids, None
    if batch.images is not None:
        positions, images = image_positions(batch, batch.images), row_images(batch, batch.images, where)
    return Layout(batch.token_ids[take], positions[take], packing, where, take, images)


def _shape(segments: Sequence[_Segment], index: int) -> tuple[bool, int, int, int]:
    """Prefixes and whole sequences first, equal shapes side by side: they share a kernel call."""
    segment = segments[index]
    prefix = 0 if segment.parent is None else segments[segment.parent].length
    return segment.parent is not None, prefix, segment.length, index


def _segments(batch: Batch) -> tuple[list[_Segment], list[list[int]]]:
    """All segments, and for each sequence of the batch the ones that make it up."""
    tokens, ends = batch.token_ids.tolist(), batch.cu_seqlens.tolist()
    groups: dict[int, list[int]] = {}
    for sequence, group in enumerate(batch.group_index.tolist()):
        groups.setdefault(group, []).append(sequence)
    segments: list[_Segment] = []
    members: list[list[int]] = [[] for _ in range(batch.num_sequences)]
    for sequences in groups.values():
        shared = _shared_beginning([tokens[ends[i] : ends[i + 1]] for i in sequences]) if len(sequences) > 1 else 0
        if shared and ROUTES in batch.extras:
            shared = _shared_routes(batch.extras[ROUTES], [ends[i] for i in sequences], shared)
        if shared and batch.images is not None:
            shared = shared_by_images(batch.images, sequences, shared)
        parent = None
        if shared >= _SHORTEST:
            parent = len(segments)
            segments.append(_Segment(ends[sequences[0]], shared))
        for i in sequences:
            start = ends[i] if parent is None else ends[i] + shared
            members[i] = [len(segments)] if parent is None else [parent, len(segments)]
            segments.append(_Segment(start, ends[i + 1] - start, parent))
    return segments, members


def _shared_beginning(sequences: list[list[int]]) -> int:
    """How many tokens all of them begin with; every sequence keeps at least one token of its own."""
    first, last = min(sequences), max(sequences)  # what these two share, all between them share
    shortest = min(len(sequence) for sequence in sequences) - 1
    return next((i for i in range(shortest) if first[i] != last[i]), shortest)


def _shared_routes(routes: Tensor, starts: Sequence[int], length: int) -> int:
    """How many of the first `length` tokens go to the same experts in all sequences."""
    first, *others = (routes[start : start + length] for start in starts)
    for other in others:
        same = (other == first).flatten(1).all(1)
        length = min(length, int(same.long().cumprod(0).sum()))
    return length
