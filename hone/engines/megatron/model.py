"""The modules that hone puts into Megatron-Core's layers, and the model: packed tokens in, hidden states out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hone.engines.megatron.families import ModelShape
from hone.engines.megatron.mesh import MegatronRanks
from hone.models.attention.packed import Packing, Scoring, attend


@dataclass(frozen=True, slots=True)
class PackedRow:
    """What attention needs of a row; it travels through Megatron's layers as their `packed_seq_params`."""

    packing: Packing
    scale: float  # of attention scores, from rotary positions: 1 for most types
    qkv_format: str = "row"  # anything but thd, for which Megatron wants Transformer Engine
    cp_group: Any = None


class PackedAttention(MegatronModule):  # type: ignore[misc]  # Megatron has no types
    """hone's packed attention in place of Megatron's core attention; context parallelism is Ulysses."""

    def __init__(self, config: ModelShape, layer_number: int, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self._scale = softmax_scale or config.kv_channels**-0.5
        self._window = config.windows[layer_number - 1]

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
        packing = packed_seq_params.packing
        scoring = Scoring(scale=self._scale * packed_seq_params.scale, window=self._window)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if packing.ranks is None:
            out = attend(q, k, v, packing, scoring)
        else:
            q, k, v = (packing.ranks.to_heads(x, packing.num_tokens) for x in (q, k, v))
            out = packing.ranks.to_tokens(attend(q, k, v, packing, scoring))
        return out.permute(2, 0, 1, 3).flatten(2)


class Norm(nn.RMSNorm):
    """Megatron's own torch norm refuses sequence parallelism; this one marks its weight, whose gradient is a sum."""

    def __init__(self, config: ModelShape, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class Model(GPTModel):  # type: ignore[misc]  # Megatron has no types
    """A part of the model on one pipeline stage (all of it without pipeline)."""

    def forward(self, token_ids: Tensor, rotary: Tensor, row: PackedRow) -> Tensor:
        """Token ids [T] of the row, rotary angles [T, 1, 1, d] -> hidden states [T, 1, H] of this rank's tokens."""
        hidden = self._embed(token_ids) if self.pre_process else None
        return self.decoder(  # type: ignore[no-any-return]
            hidden_states=hidden, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=row
        )

    def _embed(self, token_ids: Tensor) -> Tensor:
        # Not `self.embedding(...)`: its dropout wants CUDA's random states under sequence parallelism.
        words = self.embedding.word_embeddings
        hidden: Tensor = words(token_ids[None])
        scattered = words.reduce_scatter_embeddings
        hidden = hidden if scattered else hidden.transpose(0, 1).contiguous()
        if self.config.padding_token is not None:
            pad = token_ids == self.config.padding_token
            if scattered:
                pad = pad.chunk(self.pg_collection.tp.size())[self.pg_collection.tp.rank()]
            hidden = torch.where(pad[:, None, None], hidden.detach(), hidden)
        return hidden

    @property
    def first_layer(self) -> int:
        """Number of this part's first layer in the whole model, from 0."""
        return int(self.decoder.layers[0].layer_number) - 1

    @property
    def copies_embedding(self) -> bool:
        """Whether the head is a copy of the embedding, which another stage has."""
        return bool(self.share_embeddings_and_output_weights and self.post_process and not self.pre_process)

    def head_weight(self) -> Tensor:
        """This rank's rows of the head, the last ones perhaps padding."""
        tied: bool = self.share_embeddings_and_output_weights
        weight: Tensor = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return weight

    def setup_embeddings_and_output_layer(self) -> None:
        """Mark weights that two stages share.

        Both copies are read from the files, so nothing is sent here, as Megatron's own method does through CUDA.
        """
        if not self.share_embeddings_and_output_weights:
            return
        weight: Any = self.shared_embedding_or_output_weight()
        if self.config.pipeline_model_parallel_size == 1:
            weight.zero_out_wgrad = True
        else:
            weight.shared_embedding = True
            weight.shared = self.post_process


def build_part(
    config: ModelShape, ranks: MegatronRanks, transformers_config: Any, virtual_stage: int | None, is_value_model: bool
) -> Model:
    """Build the layers of this rank's stage, with memory for weights but no values."""
    last = ranks.sizes.virtual - 1
    first_stage = ranks.stage == 0 and virtual_stage in (None, 0)
    last_stage = ranks.stage == ranks.sizes.pipeline - 1 and virtual_stage in (None, last)
    vocabulary = ranks.vocabulary_share(transformers_config.vocab_size) * ranks.sizes.tensor
    part = Model(
        config,
        _layers(config, virtual_stage),
        vocabulary,
        transformers_config.max_position_embeddings,
        pre_process=first_stage,
        post_process=last_stage,
        share_embeddings_and_output_weights=transformers_config.tie_word_embeddings and not is_value_model,
        position_embedding_type="none",
        vp_stage=virtual_stage,
    )
    if is_value_model and last_stage:
        del part.output_layer
        part.score = nn.Linear(config.hidden_size, 1, bias=False, dtype=config.params_dtype)
    return part


def _layers(config: ModelShape, virtual_stage: int | None) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    if config.qk_layernorm:
        parts.self_attention.submodules.q_layernorm = Norm
        parts.self_attention.submodules.k_layernorm = Norm
    parts.self_attention.submodules.core_attention = PackedAttention
    count = get_num_layers_to_build(config, vp_stage=virtual_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=Norm)


def recompute_layers(part: Model) -> None:
    """Keep only each layer's input for the backward, and run the layer again there."""
    for layer in part.decoder.layers:
        layer.forward = _recomputed(layer.forward)


def _recomputed(forward: Any) -> Any:
    def run(**arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(**arguments)
        return checkpoint(forward, use_reentrant=False, **arguments)

    return run
