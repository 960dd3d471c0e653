"""hone's packed attention in place of Megatron's, which has no packed rows without Transformer Engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from hone.models.attention.packed import Packing, Scoring, attend


@dataclass(frozen=True, slots=True)
class PackedRow:
    """Input of attention for a row; it travels through Megatron's layers as their `packed_seq_params`."""

    packing: Packing
    scale: float  # of the rotary part of queries and of keys: 1 for most types of positions
    qkv_format: str = "row"  # anything but thd, for which Megatron wants Transformer Engine
    cp_group: Any = None
    thd: Any = None  # `modules.thd.ThdRow`, where Transformer Engine computes attention


class PackedAttention(MegatronModule):  # type: ignore[misc]  # Megatron has no types
    """hone's packed attention in place of Megatron's core attention; context parallelism is Ulysses."""

    def __init__(self, config: Any, layer_number: int, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self._scale = softmax_scale or config.kv_channels**-0.5
        self._window = config.windows[layer_number - 1]
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        self.sinks = nn.Parameter(torch.empty(heads, dtype=config.params_dtype)) if config.has_sinks else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        packed_seq_params: PackedRow | None = None,
        **_: Any,
    ) -> Tensor:
        """[T, 1, heads, d] each -> [T, 1, heads * d]."""
        assert packed_seq_params is not None
        sinks: Tensor | None = self.sinks
        ranks = packed_seq_params.packing.ranks
        if sinks is not None and ranks is not None:  # of the heads that this rank has in attention
            sinks = sinks.chunk(ranks.size)[ranks.rank]
        scoring = Scoring(scale=self._scale * packed_seq_params.scale**2, window=self._window, sinks=sinks)
        return attend_row(query, key, value, packed_seq_params, scoring)


def attend_row(query: Tensor, key: Tensor, value: Tensor, row: PackedRow, scoring: Scoring) -> Tensor:
    """Attention over a row that context ranks share: [T, 1, heads, d] each, values [..., dv] -> [T, 1, heads * dv]."""
    packing = row.packing
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    if packing.ranks is None:
        out = attend(q, k, v, packing, scoring)
    else:
        q, k, v = (packing.ranks.to_heads(x, packing.num_tokens) for x in (q, k, v))
        out = packing.ranks.to_tokens(attend(q, k, v, packing, scoring))
    return out.permute(2, 0, 1, 3).flatten(2)
