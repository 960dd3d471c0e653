"""The images of a batch: packed beside its tokens, and cut with its sequences.

    Image (encoded bytes) of each sequence --each different one read once--> patches [P, D]
                                           --where its placeholders begin--> index, starts [M]

A placeholder stands for an image only where an image was put: one that a policy samples by itself is a token like any
other. So where images are is written down here, once, and nobody looks for placeholders later.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import torch
from torch import Tensor

from hone.spans import ranges
from hone.types import BatchImages, Image


class ImagePlaceError(ValueError):
    """Tokens that have no place for the images that are said to be in them."""


def places(token_ids: Sequence[int], images: Sequence[Image], where: str) -> list[int]:
    """For each image, the position of its first placeholder in a sequence.

    The first placeholders of the sequence are those of its images, in order; there may be more after them. Raises
    ImagePlaceError, beginning with `where`, if there are fewer, or if an image's are not side by side.
    """
    found: list[int] = []
    after = 0
    for number, image in enumerate(images):
        try:
            start = token_ids.index(image.token_id, after)
        except ValueError:
            start = len(token_ids)
        after = start + image.tokens
        if list(token_ids[start:after]) != [image.token_id] * image.tokens:
            there = sum(token == image.token_id for token in token_ids)
            raise ImagePlaceError(
                f"{where}: image {number} takes {image.tokens} tokens in a row, which are not there: its tokens have "
                f"{there} image placeholders for {len(images)} images of {sum(i.tokens for i in images)} in all"
            )
        found.append(start)
    return found


def pack_images(
    token_ids: Sequence[Sequence[int]], images: Sequence[Sequence[Image]], names: Sequence[str]
) -> BatchImages | None:
    """The images of all sequences, each different one once; None if there are none.

    `names` say which sequence is which in errors. Raises ImagePlaceError as `places` does.
    """
    numbers: dict[Image, int] = {}
    index: list[int] = []
    starts: list[int] = []
    for tokens, shown, name in zip(token_ids, images, names, strict=True):
        starts += places(tokens, shown, name)
        index += [numbers.setdefault(image, len(numbers)) for image in shown]
    if not numbers:
        return None
    return BatchImages(
        patches=torch.from_numpy(np.concatenate([image.patches() for image in numbers])),
        grids=torch.tensor([image.grid for image in numbers]),
        tokens=torch.tensor([image.tokens for image in numbers]),
        index=torch.tensor(index),
        starts=torch.tensor(starts),
        counts=torch.tensor([len(shown) for shown in images]),
    )


def select_images(images: BatchImages, chosen: Tensor) -> BatchImages | None:
    """The images that the sequences `chosen` [n] show; None if they show none."""
    chosen = chosen.to(images.counts.device)
    shown = _items(images.counts, chosen)
    if not len(shown):
        return None
    kept, index = images.index[shown].unique(return_inverse=True)  # type: ignore[no-untyped-call]
    rows = _items(images.grids.prod(1), kept)
    whole = len(kept) == len(images.grids)
    return replace(
        images,
        patches=images.patches if whole else images.patches[rows],
        grids=images.grids[kept],
        tokens=images.tokens[kept],
        index=index,
        starts=images.starts[shown],
        counts=images.counts[chosen],
    )


def images_on(images: BatchImages, device: str) -> BatchImages:
    """The images with every tensor on a device."""
    return BatchImages(**{one.name: getattr(images, one.name).to(device, non_blocking=True) for one in fields(images)})


def image_names(images: BatchImages) -> list[tuple[int, ...]]:
    """For each sequence, the numbers of the images that it shows."""
    ends = [0, *itertools.accumulate(images.counts.tolist())]
    index = images.index.tolist()
    return [tuple(index[a:b]) for a, b in itertools.pairwise(ends)]


def _items(sizes: Tensor, chosen: Tensor) -> Tensor:
    """The places of the items of some of several parts that lie end to end, given the parts' sizes."""
    return ranges((sizes.cumsum(0) - sizes)[chosen], sizes[chosen])


__all__ = ["ImagePlaceError", "image_names", "images_on", "pack_images", "places", "select_images"]
