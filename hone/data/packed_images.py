"""The images of a batch: packed with its tokens and cut with its sequences.

    Image (encoded bytes) of each sequence --each different one read once--> patches [P, D]
                                           --where its placeholders begin--> index, starts [M]

Packing stores the positions of images once; no later code searches for placeholders. So a placeholder token that the
policy samples is an ordinary token.
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
    """Error for tokens without placeholders for their images."""


def places(token_ids: Sequence[int], images: Sequence[Image], where: str) -> list[int]:
    """Find the position of each image's first placeholder in a sequence.

    The sequence's first placeholders belong to its images, in order; more may follow. Raises ImagePlaceError,
    beginning with `where`, if there are too few or if an image's placeholders are not adjacent.
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
) -> BatchImages:
    """Pack the images of all sequences, of which there is at least one, storing equal images once.

    Errors name a sequence by its entry in `names`. Raises ImagePlaceError as `places` does.
    """
    numbers: dict[Image, int] = {}
    index: list[int] = []
    starts: list[int] = []
    for tokens, shown, name in zip(token_ids, images, names, strict=True):
        starts += places(tokens, shown, name)
        index += [numbers.setdefault(image, len(numbers)) for image in shown]
    return BatchImages(
        patches=torch.from_numpy(np.concatenate([image.patches() for image in numbers])),
        grids=torch.tensor([image.grid for image in numbers]),
        tokens=torch.tensor([image.tokens for image in numbers]),
        index=torch.tensor(index),
        starts=torch.tensor(starts),
        counts=torch.tensor([len(shown) for shown in images]),
    )


def select_images(images: BatchImages, chosen: Tensor) -> BatchImages | None:
    """Take the images of the sequences `chosen` [n]; None if they have none."""
    chosen = chosen.to(images.counts.device)
    shown = _items(images.counts, chosen)
    if not len(shown):
        return None
    kept, index = images.index[shown].unique(return_inverse=True)
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
    """Copy all tensors of the images to a device."""
    return BatchImages(**{one.name: getattr(images, one.name).to(device, non_blocking=True) for one in fields(images)})


def image_names(images: BatchImages) -> list[tuple[int, ...]]:
    """Numbers of the images of each sequence."""
    ends = [0, *itertools.accumulate(images.counts.tolist())]
    index = images.index.tolist()
    return [tuple(index[a:b]) for a, b in itertools.pairwise(ends)]


def _items(sizes: Tensor, chosen: Tensor) -> Tensor:
    """Positions of the items of the parts `chosen`, for parts of these sizes laid end to end."""
    return ranges((sizes.cumsum(0) - sizes)[chosen], sizes[chosen])


__all__ = ["ImagePlaceError", "image_names", "images_on", "pack_images", "places", "select_images"]
