"""Transformer Engine's attention over packed rows (its format `thd`), on NVIDIA GPUs where it is installed.

    queries   [prompt] [answer 1]          [answer 2]              the segments of the row
    keys      [prompt] [prompt, answer 1]  [prompt, answer 2]      gathered, if a prompt is shared

NEVER RUN: the tests have no GPU. It was written from the interfaces of Transformer Engine 2 and megatron-core 0.16; the
tests compare its rows with hone's own attention.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from hone.models.attention.packed import Packing
from hone.platforms.base import PlatformBase
from hone_megatron.modules.attention import PackedAttention, PackedRow

MASK = "padding_causal_bottom_right"  # the last query of a segment sees all of its keys


@dataclass(frozen=True, slots=True)
class ThdRow:
    """A row as Transformer Engine wants it."""

    lengths: PackedSeqParams
    keys: Tensor | None  # [K] the token of the row that each key is; None: each token once


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The attention of every layer, and what it gets of each row."""

    module: type
    lay: Callable[[Packing, float], PackedRow]
    why_not_thd: str = ""  # why it is not Transformer Engine's


def choose_attention(config: Any, platform: PlatformBase) -> AttentionChoice:
    """Choose the attention of a model of these sizes (a `ModelShape`), once for all of its layers."""
    why_not = _why_not_thd(config, platform)
    if why_not:
        return AttentionChoice(PackedAttention, PackedRow, why_not)
    return AttentionChoice(ThdAttention, lambda packing, scale: PackedRow(packing, scale, thd=thd_row(packing)))


def _why_not_thd(config: Any, platform: PlatformBase) -> str:
    reasons = {
        "it runs on NVIDIA GPUs": platform.vendor != "nvidia",
        "transformer_engine is not installed": importlib.util.find_spec("transformer_engine") is None,
        "its packed rows are 16-bit": config.params_dtype != torch.bfloat16,
        "context ranks share heads in hone's attention": config.context_parallel_size > 1,
        "latent attention is hone's": config.latent is not None,
        "hone adds the sinks": config.has_sinks,
        "windows differ between layers": any(window is not None for window in config.windows),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def thd_row(packing: Packing) -> ThdRow:
    """Lengths of the segments and of what they see, and where the keys are. Reads nothing from the device."""
    seen = [run.prefix + run.length for run in packing.runs for _ in range(run.count)]
    device = packing.cu_seqlens.device
    keys, ends = None, packing.cu_seqlens
    if any(run.prefix for run in packing.runs):
        keys = _keys(packing, device)
        ends = torch.tensor([0, *seen]).cumsum(0).to(device, torch.int32, non_blocking=True)
    lengths = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=packing.cu_seqlens,
        cu_seqlens_kv=ends,
        max_seqlen_q=max(packing.lengths),
        max_seqlen_kv=max(seen),
    )
    return ThdRow(lengths, keys)


def _keys(packing: Packing, device: torch.device) -> Tensor:
    found, begins, begin = [], [], 0
    for run in packing.runs:
        begins.append(begin)
        own = begin + torch.arange(run.count * run.length, device=device).view(run.count, run.length)
        if run.rows is not None:
            first = begins[run.source] + run.rows[:, None] * run.prefix
            own = torch.cat([first + torch.arange(run.prefix, device=device), own], 1)
        found.append(own.flatten())
        begin += run.count * run.length
    return torch.cat(found)


class ThdAttention(MegatronModule):  # type: ignore[misc]  # Megatron has no types
    """Transformer Engine's dot-product attention in place of Megatron's core attention.

    Megatron's wrapper of it is not used: its masks do not end at the last key.
    """

    def __init__(
        self, config: Any, layer_number: int, softmax_scale: float | None = None, pg_collection: Any = None, **_: Any
    ) -> None:
        super().__init__(config=config)
        cls: Any = importlib.import_module("transformer_engine.pytorch").DotProductAttention
        self._attention = cls(
            num_attention_heads=config.num_attention_heads,
            kv_channels=config.kv_channels,
            num_gqa_groups=config.num_query_groups,
            attention_dropout=0.0,
            qkv_format="thd",
            attn_mask_type=MASK,
            tp_size=config.tensor_model_parallel_size,
            tp_group=None if pg_collection is None else pg_collection.tp,
            layer_number=layer_number,
            softmax_scale=softmax_scale or config.kv_channels**-0.5,
        )

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, packed_seq_params: PackedRow, **_: Any
    ) -> Tensor:
        """[T, 1, heads, d] each -> [T, 1, heads * d]."""
        row: ThdRow = packed_seq_params.thd
        q, k, v = (x[:, 0] for x in (query, key, value))
        if packed_seq_params.scale != 1:
            q = q * packed_seq_params.scale**2
        if row.keys is not None:
            k, v = (x.index_select(0, row.keys) for x in (k, v))
        lengths = row.lengths
        out: Tensor = self._attention(
            q,
            k,
            v,
            qkv_format="thd",
            attn_mask_type=MASK,
            cu_seqlens_q=lengths.cu_seqlens_q,
            cu_seqlens_kv=lengths.cu_seqlens_kv,
            max_seqlen_q=lengths.max_seqlen_q,
            max_seqlen_kv=lengths.max_seqlen_kv,
        )
        return out.reshape(len(q), 1, -1)
