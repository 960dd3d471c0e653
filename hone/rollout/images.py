"""Images of requests: their places in a prompt, and the tensors that the model is given at prefill."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from hone.data.packed_images import places
from hone.models.vision.model import RowImages, merge_size, positions_of, sees_images
from hone.types import Image

PlacedImages = tuple[tuple[int, Image], ...]
"""(first placeholder, image) of each image of a prompt."""


def place_images(
    request_id: str, prompt: tuple[int, ...], images: Sequence[Image], config: PreTrainedConfig
) -> tuple[PlacedImages, int]:
    """The images of a prompt (at least one) and their places, and how far positions after them are ahead of the column.

    Raises ValueError if the model takes text only, if an image has no placeholder, or if the prompt ends within one.
    """
    where = f"request {request_id!r}"
    if not sees_images(config):
        raise ValueError(f"{where} has {len(images)} images, but a model of type {config.model_type!r} takes text only")
    placed = tuple(zip(places(prompt, images, where), images, strict=True))
    start, last = placed[-1]
    if start + last.tokens >= len(prompt):
        raise ValueError(f"{where} ends with an image: at least one token has to follow it")
    return placed, positions_of(len(prompt), _grids(placed), merge_size(config))[1]


def row_of(
    sequences: Sequence[PlacedImages], lengths: Sequence[int], padded: int, device: torch.device
) -> tuple[Tensor, RowImages]:
    """For sequences that lie end to end: positions [padded, 3] of their tokens, and their images."""
    numbers: dict[Image, int] = {}
    positions, at, taken = [], [], []
    begin = 0
    for placed, length in zip(sequences, lengths, strict=True):
        positions.append(positions_of(length, _grids(placed), _merge(placed))[0])
        for start, image in placed:
            number = numbers.setdefault(image, len(numbers))
            at.append(np.arange(begin + start, begin + start + image.tokens))
            taken.append((number, image.tokens))
        begin += length
    positions.append(torch.arange(padded - begin)[:, None].repeat(1, 3))
    firsts = np.cumsum([0, *(image.tokens for image in numbers)])
    features = [np.arange(firsts[number], firsts[number] + tokens) for number, tokens in taken]
    row = RowImages(
        patches=torch.from_numpy(np.concatenate([image.patches() for image in numbers])).to(device),
        grids=torch.tensor([image.grid for image in numbers], device=device),
        feature=torch.from_numpy(np.concatenate(features)).to(device),
        at=torch.from_numpy(np.concatenate(at)).to(device),
    )
    return torch.cat(positions).to(device), row


def _grids(placed: PlacedImages) -> list[tuple[int, tuple[int, int, int]]]:
    return [(start, image.grid) for start, image in placed]


def _merge(placed: PlacedImages) -> int:
    """Patches per side that one token covers, from the first image; 1 without images."""
    if not placed:
        return 1
    _, rows, columns = placed[0][1].grid
    return int((rows * columns / placed[0][1].tokens) ** 0.5)


__all__ = ["PlacedImages", "place_images", "row_of"]
