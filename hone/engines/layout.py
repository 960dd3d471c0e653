"""Prefix sharing: lay a micro-batch out as one row in which a prefix shared by several sequences occurs once.

    batch       [q q q a a] [q q q b] [r r c c c]          sequences, each whole
    row         [q q q] [r r c c c] [a a] [b]              segments: prefixes and whole sequences, then the branches
                   ^------------------'----'               a branch attends to its prefix and to itself

The n answers to one prompt share its tokens, which saves a quarter to a half of a step's work where answers are short.
A shared token has the same hidden state in all of its sequences, so results are the same up to rounding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hone.data.packed_images import image_names
from hone.data.packing import (
    SHORTEST_SHARED,
    groups_of,
    microbatches,
    microbatches_of_groups,
    shared_beginning,
)
from hone.models.attention.packed import Packing
from hone.models.attention.sequence_parallel import current_ranks
from hone.models.vision.model import RowImages, positions_of
from hone.spans import cumulative, ranges, repeat
from hone.types import Batch, BatchImages

_MORE = 1.25  # times as many micro-batches pay off if each prompt is computed about once


@dataclass(frozen=True, slots=True)
class Layout:
    """The row for the model, and the place of each token of the batch in it."""

    token_ids: Tensor  # [R], R <= T
    position_ids: Tensor  # [R], or [R, 3] where images are shown
    packing: Packing
    where: Tensor  # [T] index into the row
    take: Tensor  # [R] index into the batch
    first: Tensor  # [T] index into the batch: the first token with the same place in the row; in host memory
    images: RowImages | None = None


@dataclass(frozen=True, slots=True)
class _Segment:
    start: int  # in the batch
    length: int
    parent: int | None = None  # number of the prefix's segment, before sorting


def on_host(batch: Batch) -> Batch:
    """The batch itself, or for a part on a device the same part in host memory, where reading waits for nothing."""
    if batch.token_ids.device.type == "cpu" or batch.origin is None:
        return batch
    return batch.origin.part


def cut_batch(batch: Batch, max_tokens: int, whole_groups: bool = False) -> list[list[int]]:
    """Cut a batch into micro-batches: index lists of at most `max_tokens` tokens.

    Sequences of a group share their prompt, so they stay together unless that takes `_MORE` times as many
    micro-batches, and always with `whole_groups`, for losses that compare them. The cap counts shared tokens for each
    sequence. Raises ValueError if a sequence, or a group that must stay whole, is longer.
    """
    if whole_groups:
        return microbatches_of_groups(batch, max_tokens)
    cut, groups, lengths = microbatches(batch, max_tokens), groups_of(batch), batch.lengths.tolist()
    if len(cut) <= 1 or len(groups) == batch.num_sequences:
        return cut
    together: list[list[int]] = [[]]  # one group after the other, divided where a micro-batch is full
    for i in itertools.chain.from_iterable(groups):
        if sum(lengths[j] for j in together[-1]) + lengths[i] > max_tokens:
            together.append([])
        together[-1].append(i)
    if max(sum(lengths[i] for i in group) for group in groups) <= max_tokens:
        together = min(microbatches_of_groups(batch, max_tokens), together, key=len)
    return together if len(together) <= _MORE * len(cut) else cut


def lay_out(batch: Batch) -> Layout:
    """Build the shortest row for a micro-batch; sequences share a prefix within their group (`batch.group_index`).

    A row that is shared by ranks gets at least one token for each of them: fillers that no sequence sees.
    """
    segments, members = _segments(on_host(batch))
    if (ranks := current_ranks()) is not None:
        segments += [_Segment(0, 1)] * (ranks.size - sum(segment.length for segment in segments))
    order = sorted(range(len(segments)), key=lambda i: _shape(segments, i))
    place = {segment: position for position, segment in enumerate(order)}
    ordered = [segments[i] for i in order]
    lengths = [segment.length for segment in ordered]
    device = batch.token_ids.device
    take = ranges(torch.tensor([segment.start for segment in ordered]), torch.tensor(lengths))
    cu_seqlens = cumulative(torch.tensor(lengths))
    begins = cu_seqlens.tolist()
    pieces = [(begins[place[s]], segments[s].length) for sequence in members for s in sequence]
    packing = Packing.of(cu_seqlens, [None if s.parent is None else place[s.parent] for s in ordered], device)
    where = ranges(*torch.tensor(pieces).T)
    first, take, where = take[where], take.to(device), where.to(device)
    positions, images = batch.position_ids, None
    if batch.images is not None:
        positions, images = _image_positions(batch, batch.images), _row_images(batch, batch.images, where)
    return Layout(batch.token_ids[take], positions[take], packing, where, take, first, images)


def _shape(segments: Sequence[_Segment], index: int) -> tuple[bool, int, int, int]:
    """Sort key: prefixes and whole sequences first, then by shape, because equal shapes share a kernel call."""
    segment = segments[index]
    prefix = 0 if segment.parent is None else segments[segment.parent].length
    return segment.parent is not None, prefix, segment.length, index


def _segments(batch: Batch) -> tuple[list[_Segment], list[list[int]]]:
    """All segments, and the segments of each sequence of the batch."""
    tokens, ends = batch.token_ids.tolist(), batch.cu_seqlens.tolist()
    segments: list[_Segment] = []
    members: list[list[int]] = [[] for _ in range(batch.num_sequences)]
    for sequences in groups_of(batch):
        shared = shared_beginning([tokens[ends[i] : ends[i + 1]] for i in sequences]) if len(sequences) > 1 else 0
        if shared and batch.routed_experts is not None:
            shared = _shared_routes(batch.routed_experts, [ends[i] for i in sequences], shared)
        if shared and batch.images is not None:
            shared = _shared_by_images(batch.images, sequences, shared)
        parent = None
        if shared >= SHORTEST_SHARED:
            parent = len(segments)
            segments.append(_Segment(ends[sequences[0]], shared))
        for i in sequences:
            start = ends[i] if parent is None else ends[i] + shared
            members[i] = [len(segments)] if parent is None else [parent, len(segments)]
            segments.append(_Segment(start, ends[i + 1] - start, parent))
    return segments, members


def _shared_routes(routes: Tensor, starts: Sequence[int], length: int) -> int:
    """Number of leading tokens, of `length`, that go to the same experts in all sequences."""
    first, *others = (routes[start : start + length] for start in starts)
    for other in others:
        same = (other == first).flatten(1).all(1)
        length = min(length, int(same.long().cumprod(0).sum()))
    return length


def _image_positions(batch: Batch, images: BatchImages) -> Tensor:
    """Frame, row and column of every token of the batch, [T, 3]; each sequence starts at 0."""
    merge = math.isqrt(int(images.grids[0].prod()) // int(images.tokens[0]))
    grids, starts = images.grids.tolist(), images.starts.tolist()
    found, at = [], 0
    for length, names in zip(batch.lengths.tolist(), image_names(images), strict=True):
        shown = [(starts[at + number], tuple(grids[name])) for number, name in enumerate(names)]
        found.append(positions_of(length, shown, merge)[0])
        at += len(names)
    return torch.cat(found).to(batch.token_ids.device)


def _row_images(batch: Batch, images: BatchImages, where: Tensor) -> RowImages:
    """Map image features to the row, where each token of the batch is at `where` [T]; a shared one has one feature."""
    shown = repeat(torch.arange(batch.num_sequences, device=where.device), images.counts)
    sizes = images.tokens[images.index]
    tokens = ranges(batch.cu_seqlens[shown] + images.starts, sizes)
    features = ranges((images.tokens.cumsum(0) - images.tokens)[images.index], sizes)
    at, each = where[tokens].unique(return_inverse=True)
    return RowImages(images.patches, images.grids, features.new_empty(len(at)).scatter_(0, each, features), at)


def _shared_by_images(images: BatchImages, sequences: list[int], length: int) -> int:
    """Number of leading tokens, of `length`, that sequences can share: it ends before an image that may differ."""
    names = image_names(images)
    if len({names[i] for i in sequences}) == 1:
        return length
    ends = images.counts.cumsum(0).tolist()
    return min(length, *(int(images.starts[ends[i] - len(names[i])]) for i in sequences if names[i]))
