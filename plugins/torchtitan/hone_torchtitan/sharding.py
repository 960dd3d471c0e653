"""Distribute an empty decoder over the meshes: torchtitan's tensor parallelism, then its `fully_shard` of each layer.

torchtitan's own functions for whole families (`parallelize_qwen3`) do the same, but leave no place to tie weights again
between the two: with tensor parallelism a tied embedding and head would be two weights.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

from hone.engines.fsdp2.sharding import sum_gradients
from hone.models.attention.packed import checkpoint_contexts
from hone_torchtitan.mesh import TitanRanks
from hone_torchtitan.modules import Rotary


def shard_decoder(decoder: Any, ranks: TitanRanks, compute: torch.dtype, recompute: bool) -> None:
    """Shard a decoder on the meta device in place; `recompute` keeps only each layer's input for the backward."""
    if ranks.sizes.tensor > 1:
        decoder.parallelize(ranks.dims)
        if decoder.enable_weight_tying:
            decoder.tok_embeddings.weight = decoder.lm_head.weight
    if recompute:
        _recompute_layers(decoder)
    names = ["dp_replicate", "fsdp"] if ranks.sizes.replicate > 1 else ["fsdp"]
    apply_fsdp_to_decoder(
        decoder, ranks.dims.get_mesh(names), param_dtype=compute, reduce_dtype=torch.float32, pp_enabled=False
    )
    for module in sharded_modules(decoder):
        sum_gradients(module)


def allocate(decoder: nn.Module, device: str) -> None:
    """Give a sharded decoder memory on the device, and its rotary positions their frequencies."""
    decoder.to_empty(device=device)
    for module in decoder.modules():
        if isinstance(module, Rotary):
            module.init_states(buffer_device=torch.device(device))


def sharded_modules(decoder: nn.Module) -> Iterator[Any]:
    """The modules whose weights `fully_shard` gathers together."""
    return (module for module in decoder.modules() if isinstance(module, FSDPModule))


def _recompute_layers(decoder: Any) -> None:
    """Run each layer again in the backward, with the packing of the forward. Names of weights stay as they are."""
    for layer in decoder.layers.values():
        layer.forward = functools.partial(
            checkpoint, layer.forward, use_reentrant=False, context_fn=checkpoint_contexts
        )
