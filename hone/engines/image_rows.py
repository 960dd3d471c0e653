"""Where the images of a micro-batch are in the row that the model sees."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hone.data.packed_images import image_names
from hone.models.vision import RowImages, positions_of
from hone.spans import ranges, repeat
from hone.types import Batch, BatchImages


def image_positions(batch: Batch, images: BatchImages) -> Tensor:
    """[T, 3]: frame, row and column of every token of the batch, each sequence from 0."""
    merge = math.isqrt(int(images.grids[0].prod()) // int(images.tokens[0]))
    grids, starts = images.grids.tolist(), images.starts.tolist()
    found, at = [], 0
    for length, names in zip(batch.lengths.tolist(), image_names(images), strict=True):
        shown = [(starts[at + number], tuple(grids[name])) for number, name in enumerate(names)]
        found.append(positions_of(length, shown, merge)[0])
        at += len(names)
    return torch.cat(found).to(batch.token_ids.device)


def row_images(batch: Batch, images: BatchImages, where: Tensor) -> RowImages:
    """The images for the model: which token of the row takes which feature; a token that is shared takes it once.

    `where` [T] is the place in the row of each token of the batch.
    """
    shown = repeat(torch.arange(batch.num_sequences, device=where.device), images.counts)
    sizes = images.tokens[images.index]
    tokens = ranges(batch.cu_seqlens[shown] + images.starts, sizes)
    features = ranges((images.tokens.cumsum(0) - images.tokens)[images.index], sizes)
    at, each = where[tokens].unique(return_inverse=True)
    return RowImages(images.patches, images.grids, features.new_empty(len(at)).scatter_(0, each, features), at)


def shared_by_images(images: BatchImages, sequences: list[int], length: int) -> int:
    """How many of the first `length` tokens some sequences can share: all, or those before an image that may differ."""
    names = image_names(images)
    if len({names[i] for i in sequences}) == 1:
        return length
    ends = images.counts.cumsum(0).tolist()
    return min(length, *(int(images.starts[ends[i] - len(names[i])]) for i in sequences if names[i]))


__all__ = ["image_positions", "row_images", "shared_by_images"]
