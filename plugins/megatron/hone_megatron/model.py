"""The model: Megatron-Core's layers with hone's modules in them; packed tokens in, hidden states out."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from hone_megatron.families import ModelShape
from hone_megatron.mesh import MegatronRanks
from hone_megatron.modules.attention import PackedRow
from hone_megatron.modules.clamped import ClampedExperts
from hone_megatron.modules.experts import Experts
from hone_megatron.modules.latent import LatentAttention
from hone_megatron.modules.norm import Norm
from hone_megatron.modules.router import Router


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
    def mixtures_before(self) -> int:
        """Number of mixtures of experts in the layers before this part's."""
        dense = self.config.num_layers - self.config.mixtures  # mixtures are the last layers
        return max(self.first_layer - int(dense), 0)

    @property
    def copies_embedding(self) -> bool:
        """Return whether the head is a copy of the embedding, which another stage has."""
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
    config: ModelShape,
    ranks: MegatronRanks,
    transformers_config: Any,
    attention: type,
    is_value_model: bool,
    virtual_stage: int | None,
) -> Model:
    """Build the layers of this rank's stage, with memory for weights but no values; `attention` is their core."""
    last = ranks.sizes.virtual - 1
    first_stage = ranks.stage == 0 and virtual_stage in (None, 0)
    last_stage = ranks.stage == ranks.sizes.pipeline - 1 and virtual_stage in (None, last)
    vocabulary = ranks.vocabulary.share(transformers_config.vocab_size) * ranks.sizes.tensor
    part = Model(
        config,
        _layers(config, attention, virtual_stage),
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


def _layers(config: ModelShape, attention: type, virtual_stage: int | None) -> TransformerBlockSubmodules:
    first = get_transformer_layer_offset(config, vp_stage=virtual_stage)
    count = get_num_layers_to_build(config, vp_stage=virtual_stage)
    dense = config.num_layers - config.mixtures  # mixtures are the last layers
    layers = [_layer(config, attention, number >= dense) for number in range(first, first + count)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm)


def _layer(config: ModelShape, attention: type, is_mixture: bool) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if is_mixture else None,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    if config.qk_layernorm:
        parts.self_attention.submodules.q_layernorm = Norm
        parts.self_attention.submodules.k_layernorm = Norm
    parts.self_attention.submodules.core_attention = attention
    if config.latent is not None:
        parts.self_attention = ModuleSpec(module=LatentAttention)
    if is_mixture:
        parts.mlp.submodules.router = Router
        parts.mlp.submodules.experts = ModuleSpec(module=Experts if config.clamps is None else ClampedExperts)
    return layer
