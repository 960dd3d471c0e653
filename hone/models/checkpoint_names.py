"""Give weights of a state dict the names and shapes that the model's files have.

transformers stores some weights differently from the files: it fuses the experts of a layer into one tensor, and the
files have one per expert. vLLM and SGLang load the layout of the files, so they are sent that layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

from hone.models.vision.model import auto_class

Named = tuple[str, Tensor]


def as_in_files(config: Any, weights: Iterable[Named]) -> Iterator[Named]:
    """Yield `weights` in the layout of the files, layer by layer; for most architectures they are unchanged."""
    try:
        with torch.device("meta"):
            model = auto_class(config.model_type).from_config(config)
    except ValueError:  # not a transformers architecture, so nothing is converted
        yield from weights
        return
    mapping = get_model_conversion_mapping(model, add_legacy=False)
    if all(
        isinstance(change, PrefixChange) for change in mapping
    ):  # `revert_weight_conversion` does not change these either
        yield from weights
        return
    for layer in by_layer(weights):
        yield from revert_weight_conversion(model, layer).items()


def by_layer(weights: Iterable[Named], at_least_bytes: int = 0) -> Iterator[dict[str, Tensor]]:
    """Group neighbouring weights into at least `at_least_bytes`. A layer is never divided, because some formats fuse
    its weights."""
    chunk: dict[str, Tensor] = {}
    held, layer = 0, ""
    for name, tensor in weights:
        now = f".{name}".partition(".layers.")[2].partition(".")[0]
        if chunk and held > at_least_bytes and now != layer:
            yield chunk
            chunk, held = {}, 0
        chunk[name], layer = tensor, now
        held += tensor.numel() * tensor.element_size()
    yield chunk
