"""Weights under the names and in the shapes of a model's files, from those of its state dict.

transformers keeps some weights otherwise than their files do: the experts of a mixture are one tensor for each layer
there, and many in the files. What reads files (vLLM, SGLang) is given what files have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

from hone.models.vision import auto_class

Named = tuple[str, Tensor]


def as_in_files(config: Any, weights: Iterable[Named]) -> Iterator[Named]:
    """`weights` of the model with this transformers config, layer by layer; most architectures' pass as they are."""
    try:
        with torch.device("meta"):
            model = auto_class(config.model_type).from_config(config)
    except ValueError:  # not an architecture of transformers: nothing there keeps its weights otherwise
        yield from weights
        return
    mapping = get_model_conversion_mapping(model, add_legacy=False)
    if all(isinstance(change, PrefixChange) for change in mapping):  # which `revert_weight_conversion` leaves out too
        yield from weights
        return
    for layer in by_layer(weights):
        yield from revert_weight_conversion(model, layer).items()


def by_layer(weights: Iterable[Named], at_least_bytes: int = 0) -> Iterator[dict[str, Tensor]]:
    """Neighbouring weights together, at least so many bytes; those of a layer are never divided, for some formats fuse
    them."""
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
