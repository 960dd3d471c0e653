"""Images of requests: where they are in a prompt, and what the model is given of them at prefill."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from hone.data.packed_images import places
from hone.models.vision import RowImages, merge_size, positions_of, sees_images
from hone.types import Image

Shown = tuple[tuple[int, Image], ...]
"""(first placeholder, image) of each image of a prompt."""


def place_images(
    request_id: str, prompt: tuple[int, ...], images: Sequence[Image], config: PreTrainedConfig
) -> tuple[Shown, int]:
    """The images of a prompt with their places, and how far positions after them are ahead of the column.

    Raises ValueError if the model sees no images, if they have no place, or if the prompt ends within one.
    """
    if not images:
        return (), 0
    where = f"request {request_id!r}"
    if not sees_images(config):
        raise ValueError(f"{where} shows {len(images)} images, but a model of type {config.model_type!r} sees none")
    shown = tuple(zip(places(prompt, images, where), images, strict=True))
    start, last = shown[-1]
    if start + last.tokens >= len(prompt):
        raise ValueError(f"{where} ends with an image: at least one token has to follow it")
    return shown, positions_of(len(prompt), _grids(shown), merge_size(config))[1]


def row_of(
    sequences: Sequence[Shown], lengths: Sequence[int], padded: int, device: torch.device
) -> tuple[Tensor, RowImages]:
    """For sequences that lie end to end: positions [padded, 3] of their tokens, and their images."""
    numbers: dict[Image, int] = {}
    positions, at, taken = [], [], []
    begin = 0
    for shown, length in zip(sequences, lengths, strict=True):
        positions.append(positions_of(length, _grids(shown), _merge(shown))[0])
        for start, image in shown:
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


def _grids(shown: Shown) -> list[tuple[int, tuple[int, int, int]]]:
    return [(start, image.grid) for start, image in shown]


def _merge(shown: Shown) -> int:
    """Patches of a side in one token, as the images themselves say it; without any it does not matter."""
    if not shown:
        return 1
    _, rows, columns = shown[0][1].grid
    return int((rows * columns / shown[0][1].tokens) ** 0.5)


__all__ = ["Shown", "place_images", "row_of"]
