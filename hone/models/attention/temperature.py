"""Attention whose temperature depends on the position of a query (Llama 4, in layers without rotary positions).

transformers takes the index in the row for the position there, which is another number in a packed row and in a decode
step. `keep_positions` turns that off; the attention functions scale the queries by the position ids of the forward:

    layer.forward(position_ids) --hook--> its attention --> `scaled_by_position` in the attention function

Source: Llama 4 (https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/models/llama4), after
"Scalable-Softmax" (https://arxiv.org/abs/2501.19399).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

SCALES = "scales_by_position"  # attribute of the attention of such a layer


def keep_positions(model: nn.Module) -> None:
    """Let the layers of a model that scale queries by position do so by the position ids they are given."""
    for layer in model.modules():
        attention: Any = getattr(layer, "self_attn", None)
        if getattr(attention, "attn_temperature_tuning", False) and not attention.use_rope:
            attention.attn_temperature_tuning = False
            setattr(attention, SCALES, True)
            layer.register_forward_pre_hook(_note, with_kwargs=True)


def _note(layer: Any, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    layer.self_attn.query_positions = named["position_ids"]


def scaled_by_position(module: Any, query: Tensor) -> Tensor:
    """Queries [1, heads, T, d] of a layer that has `SCALES`, scaled."""
    steps = torch.floor((module.query_positions.float() + 1.0) / module.floor_scale)
    scales = torch.log1p(steps) * module.attn_scale + 1.0  # [1, T]
    scaled: Tensor = (query * scales[:, None, :, None]).to(query.dtype)
    return scaled
