"""Recomputation in the backward: whole layers, or parts of them (`recompute_modules`).

    layer:  norm --> mla_up_proj --> core_attn --> projection --> norm --> mlp, or moe (with moe_act, shared_experts)

Parts have Megatron's names. Its own recomputation is not used: a router that runs again would choose anew, where routes
are replayed too, and router losses would have no gradient. Here it repeats its choice. Megatron's `layernorm` is not
offered: the matrix after a norm keeps its result anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from hone.engines.memory import kept_in_cpu_memory
from hone.models.errors import ModelError
from hone.models.routing import repeated
from hone_megatron.families import ModelShape
from hone_megatron.modules.latent import LatentAttention


def recompute_layers(part: Any, in_cpu_memory: bool = False) -> None:
    """Keep only each layer's input for the backward, perhaps in CPU memory, and run the layer again there."""
    for layer in part.decoder.layers:
        layer.forward = _recomputed(layer.forward, in_cpu_memory)


def recompute_modules(part: Any, modules: Sequence[str]) -> None:
    """Keep only the inputs of some parts of each layer, and run these parts again in the backward."""
    for layer in part.decoder.layers:
        for name in modules:
            owner, method = _place(layer, name)
            if owner is not None:
                setattr(owner, method, _recomputed(getattr(owner, method)))


def _place(layer: Any, name: str) -> tuple[Any, str]:
    """Return the owner of the method that computes a part of a layer; (None, ...) where the layer has no such part."""
    attention, mlp = layer.self_attention, layer.mlp
    is_latent, is_mixture = isinstance(attention, LatentAttention), hasattr(mlp, "experts")
    places: dict[str, tuple[Any, str]] = {
        "core_attn": (attention, "attend") if is_latent else (attention.core_attention, "forward"),
        "mla_up_proj": (attention if is_latent else None, "project"),
        "mlp": (None if is_mixture else mlp, "forward"),
        "moe": (mlp if is_mixture else None, "forward"),
        "moe_act": (mlp.experts if is_mixture else None, "from_gates"),
        "shared_experts": (mlp.shared_experts if is_mixture else None, "forward"),
    }
    return places[name]


def require_modules(modules: Sequence[str], shape: ModelShape, name: str, key: str) -> None:
    """Raise ModelError for a part that no layer of the model has."""
    dense = shape.num_layers - shape.mixtures
    lacking = {
        "mla_up_proj": "" if shape.latent else "latent attention",
        "mlp": "" if dense else "layers without experts",
        "moe": "" if shape.mixtures else "experts",
        "moe_act": "" if shape.mixtures else "experts",
        "shared_experts": "" if shape.mixtures and shape.moe_shared_expert_intermediate_size else "shared experts",
    }
    for module in modules:
        if lacking.get(module):
            raise ModelError(f"{key}: {name} has no {lacking[module]}, which {module} recomputes; remove {module}")


def _recomputed(forward: Any, in_cpu_memory: bool = False) -> Any:
    def run(*given: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*given, **named)
        if "hidden_states" in named:  # what is given by name would not be moved to CPU memory
            given = (named.pop("hidden_states"), *given)
        with kept_in_cpu_memory() if in_cpu_memory else nullcontext():
            return checkpoint(forward, *given, use_reentrant=False, context_fn=_contexts, **named)

    return run


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), repeated()
