"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) on packed rows.

    hidden --q_a, norm, q_b--> queries [heads, plain + rotary]
    hidden --kv_a--> latent --norm, kv_b--> keys [heads, plain], values [heads, value]
               '---> one rotary key for all heads

Megatron's own module computes rotary angles from a token's place in the row instead of its position in its sequence,
and splits the down projections, whose results it then gathers. Here each tensor rank has them whole and runs them on
its slice of the tokens; latents are gathered, which are narrower than hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from hone.models.attention.packed import Scoring
from hone_megatron.modules.attention import PackedRow, attend_row
from hone_megatron.modules.norm import Norm

NORM_EPS = 1e-6  # of the latents' norms, whatever the config has for the others


@dataclass(frozen=True, slots=True)
class Latent:
    """The sizes of latent attention."""

    query_rank: int | None  # None: queries are projected in one step
    rank: int
    plain: int  # of each head, without positions
    rotary: int  # of each head, with positions
    value: int
    interleaved: bool  # whether neighbouring features make a rotary pair, or those half a head apart
    scale: float  # of attention scores

    @property
    def key(self) -> int:
        return self.plain + self.rotary


class LatentAttention(MegatronModule):  # type: ignore[misc]  # Megatron has no types
    """Self attention of one layer; weights have the names of transformers'."""

    def __init__(self, config: Any, layer_number: int, pg_collection: Any, **_: Any) -> None:
        super().__init__(config=config)
        self._sizes = sizes = config.latent
        heads, self._group = config.num_attention_heads, pg_collection.tp
        if sizes.query_rank is None:
            self.q_proj = self._split(config.hidden_size, heads * sizes.key)
        else:
            self.q_a_proj = self._whole(sizes.query_rank)
            self.q_a_layernorm = Norm(config, sizes.query_rank, NORM_EPS)
            self.q_b_proj = self._split(sizes.query_rank, heads * sizes.key)
        self.kv_a_proj_with_mqa = self._whole(sizes.rank + sizes.rotary)
        self.kv_a_layernorm = Norm(config, sizes.rank, NORM_EPS)
        self.kv_b_proj = self._split(sizes.rank, heads * (sizes.plain + sizes.value))
        self.linear_proj = RowParallelLinear(
            heads * sizes.value,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=self._group,
        )

    def _split(self, wide: int, out: int) -> nn.Module:
        """A projection of which each tensor rank has some heads; it gathers the tokens of all tensor ranks."""
        module: nn.Module = ColumnParallelLinear(
            wide, out, config=self.config, init_method=self.config.init_method, bias=False, tp_group=self._group
        )
        return module

    def _whole(self, out: int) -> nn.Linear:
        """A projection that each tensor rank has whole, for its slice of the tokens: its gradient is a sum."""
        made = nn.Linear(self.config.hidden_size, out, bias=False, dtype=self.config.params_dtype)
        made.weight.sequence_parallel = self.config.sequence_parallel  # type: ignore[attr-defined]
        return made

    def forward(
        self, hidden: Tensor, *, rotary_pos_emb: Tensor, packed_seq_params: PackedRow, **_: Any
    ) -> tuple[Tensor, None]:
        """[t, 1, H] of this tensor rank's slice of the row -> the same, and no bias."""
        sizes = self._sizes
        queries = hidden if sizes.query_rank is None else self.q_a_proj(hidden)
        latent, key = self.kv_a_proj_with_mqa(hidden).split([sizes.rank, sizes.rotary], -1)
        parts = self.project(queries, latent, key, rotary_pos_emb, packed_seq_params)
        output, _ = self.linear_proj(self.attend(*parts, packed_seq_params))
        return output, None

    def project(
        self, queries: Tensor, latent: Tensor, key: Tensor, angles: Tensor, row: PackedRow
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [T, 1, heads, d] of this rank's heads; selective recomputation calls it again.

        `queries` are latents too, or the hidden states of a model without them.
        """
        sizes = self._sizes
        if sizes.query_rank is None:
            queries, _ = self.q_proj(queries)
        else:
            queries, _ = self.q_b_proj(self.q_a_layernorm(queries))
        both, _ = self.kv_b_proj(self.kv_a_layernorm(latent))
        if self.config.sequence_parallel:
            key = gather_from_sequence_parallel_region(key, group=self._group)
        else:  # each rank has the gradient from its own heads: the backward adds them up
            key = copy_to_tensor_model_parallel_region(key, group=self._group)
        plain, value = both.unflatten(-1, (-1, sizes.plain + sizes.value)).split([sizes.plain, sizes.value], -1)
        query, turned = queries.unflatten(-1, (-1, sizes.key)).split([sizes.plain, sizes.rotary], -1)
        turned, key = (self._rotated(x, angles, row.scale) for x in (turned, key[:, :, None]))
        query = torch.cat([query, turned], -1)
        return query, torch.cat([plain, key.expand(*plain.shape[:-1], -1)], -1), value

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, row: PackedRow) -> Tensor:
        """[T, 1, heads, d] each -> [T, 1, heads * value]; selective recomputation calls it again."""
        return attend_row(query, keys, values, row, Scoring(self._sizes.scale))

    def _rotated(self, x: Tensor, angles: Tensor, scale: float) -> Tensor:
        """[T, 1, heads, rotary] with angles [T, 1, 1, rotary], whose halves are equal."""
        cos, sin = ((part * scale).to(x.dtype) for part in (angles.cos(), angles.sin()))
        cos, sin = cos.chunk(2, -1)[0], sin.chunk(2, -1)[0]
        first, second = (x[..., 0::2], x[..., 1::2]) if self._sizes.interleaved else x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
