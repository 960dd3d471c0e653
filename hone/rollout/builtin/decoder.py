"""The built-in engine's model: it fills the KV cache with prompts, and turns one token per row into logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from hone.models.numerics.products import prepare
from hone.models.routing import Routers
from hone.platforms.base import current_platform
from hone.rollout.builtin.cache import CacheShape, KVCache, PackedPrompts, Step
from hone.rollout.builtin.fused import FusedDecoder, unfit_for_fusing
from hone.rollout.builtin.generic import GenericDecoder
from hone.rollout.builtin.graphs import GraphedDecoder, why_no_graphs
from hone.rollout.builtin.scoring import Following


class Decoder(Protocol):
    """A causal language model over a `KVCache`, with storage of its own for the weights."""

    cache_shapes: tuple[CacheShape, ...]  # of its layers
    routers: Routers | None  # of a mixture of experts that can be watched; see `hone.models.routing`

    def weights(self) -> Mapping[str, Tensor]:
        """The weights under Hugging Face names: writing to these tensors changes the model."""

    def prefill(self, prompts: PackedPrompts, cache: KVCache) -> None:
        """Write keys and values of every token of the prompts."""

    def decode(self, step: Step, cache: KVCache) -> Tensor:
        """Write keys and values of each row's token; logits of the next one, [step.rows, V] float32 or wider."""

    def score(self, prompts: PackedPrompts, temperature: float, top_k: int = 0) -> Following:
        """Compute each token's log-prob, and the `top_k` most likely tokens at its place. No cache is used."""


def build_decoder(
    execution: str, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, longest: int
) -> Decoder:
    """The execution path for an architecture; weights are uninitialised. `longest` is the longest sequence in tokens.

    Raises ValueError for an architecture that the wanted path cannot run exactly, or a device that records no graphs,
    with the reason.
    """
    prepare(dtype, device.type)
    obstacle, no_graphs = unfit_for_fusing(config, longest), why_no_graphs(current_platform(), device)
    if reason := {"fused": obstacle, "graphed": obstacle or no_graphs}.get(execution):
        raise ValueError(f"execution {execution!r} cannot run this model: {reason}; use 'auto' or 'generic'")
    if execution == "generic" or obstacle:
        return GenericDecoder(config, dtype, device)
    decoder = FusedDecoder(config, dtype, device)
    return decoder if execution == "fused" or no_graphs else GraphedDecoder(decoder, current_platform().record)
