"""torch.compile of each layer of the language model (`actor.backend.compile`).

    layer:  norm, q k v, rotation | attention | output projection | residual, norm, MLP, residual
            graph                   as before   graph               graph

Attention runs between the graphs, because it depends on where the sequences of a row begin. Graphs take rows of any
length, so they are compiled in the first steps only: once for training and once for inference, for each kind of layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hone.models.attention.packed import packed_attention_forward, packed_mask
from hone.models.errors import ModelError

_VARIANTS = 64  # of a kind of layer in one process: for each model, size, kind of attention, training and inference
BETWEEN_GRAPHS = "hone_packed_between_graphs"


def compile_layers(body: Any, backend: str, key: str, name: str) -> None:
    """Compile the forward of each layer, in place; a vision tower stays as it is. `key` and `name` are for errors.

    Raises ModelError for a mixture of experts.
    """
    text = getattr(body, "language_model", body)
    layers = [module for module in text.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(f"{key}: {name} has no layers that hone can compile; remove the key")
    text.config._attn_implementation = BETWEEN_GRAPHS
    # Beyond torch's limit of 8, further layers would run uncompiled, which a warning in a log alone would tell.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _VARIANTS)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch gives it no types
def _attention_between_graphs(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **asked: Any
) -> tuple[Tensor, None]:
    mixed, _ = packed_attention_forward(module, query, key, value, attention_mask, **asked)
    return mixed.contiguous(), None  # other strides, which depend on the lengths of sequences, would be compiled again


ALL_ATTENTION_FUNCTIONS.register(BETWEEN_GRAPHS, _attention_between_graphs)
ALL_MASK_ATTENTION_FUNCTIONS.register(BETWEEN_GRAPHS, packed_mask)
