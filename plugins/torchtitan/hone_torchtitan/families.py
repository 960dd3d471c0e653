"""Hugging Face configs as torchtitan's decoder, or an error that says why not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torchtitan.models.common import RMSNorm
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.decoder_sharding import norm_config
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.llama3.sharding import set_llama3_sharding_config
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

from hone.engines.rebuilt.configs import (
    DENSE,
    fixed_rotary,
    head_size,
    padding_token,
    require_computed,
    require_family,
    windows_of,
)
from hone.models.errors import ModelError
from hone_torchtitan.mesh import TitanRanks
from hone_torchtitan.modules import CalledHead, PackedAttention, PaddedEmbedding, Rotary
from hone_torchtitan.settings import TitanParallel

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
NO_VALUES: dict[str, Any] = {}  # first values that torchtitan would draw; weights are always read


def decoder_config(body: Any, name: str, ranks: TitanRanks, parallel: TitanParallel, is_value_model: bool) -> Any:
    """torchtitan's config of the decoder that computes what a transformers body on the meta device does.

    Raises ModelError naming what the engine or the mesh cannot do.
    """
    config = body.config
    require_family(config, name, "torchtitan", FAMILIES)
    require_computed(config, name, "torchtitan", DENSE)
    _require_fit(config, name, ranks, parallel)
    frequencies, scale = fixed_rotary(body, name, "torchtitan")
    rotary = Rotary.Config(
        dim=head_size(config), max_seq_len=config.max_position_embeddings, frequencies=frequencies, scale=scale
    )
    family: Any = Qwen3Model if config.model_type == "qwen3" else Llama3Model
    shapes = {"num_embeddings": config.vocab_size, "embedding_dim": config.hidden_size}
    outputs = 1 if is_value_model else config.vocab_size
    decoder = family.Config(
        vocab_size=config.vocab_size,
        dim=config.hidden_size,
        enable_weight_tying=bool(config.tie_word_embeddings) and not is_value_model,
        tok_embeddings=PaddedEmbedding.Config(**shapes, padding_token=padding_token(config)),
        layers=[_layer(config, rotary, window) for window in windows_of(config)],
        norm=_norm(config, config.hidden_size),
        lm_head=CalledHead.Config(in_features=config.hidden_size, out_features=outputs),
    )
    _set_shardings(decoder, ranks.sizes.sequence)
    if is_value_model:  # every tensor rank computes all values
        decoder.lm_head.sharding_config = norm_config(enable_sp=False)
    return decoder


def _layer(config: Any, rotary: Rotary.Config, window: int | None) -> Any:
    is_qwen3 = config.model_type == "qwen3"
    attention = make_gqa_config(
        dim=config.hidden_size,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=head_size(config),
        wqkv_param_init=NO_VALUES,
        wo_param_init=NO_VALUES,
        inner_attention=PackedAttention.Config(window=window),
        rope=rotary,
        qk_norm=_norm(config, head_size(config)) if is_qwen3 else None,
    )
    if config.model_type == "qwen2":
        linear = attention.qkv_linear
        linear.wq = dataclasses.replace(linear.wq, bias=True)
        linear.wkv = dataclasses.replace(linear.wkv, bias=True)
    block: Any = Qwen3TransformerBlock if is_qwen3 else Llama3TransformerBlock
    return block.Config(
        attention_norm=_norm(config, config.hidden_size),
        ffn_norm=_norm(config, config.hidden_size),
        attention=attention,
        feed_forward=make_ffn_config(
            dim=config.hidden_size,
            hidden_dim=config.intermediate_size,
            w1_param_init=NO_VALUES,
            w2w3_param_init=NO_VALUES,
        ),
    )


def _norm(config: Any, size: int) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=size, eps=config.rms_norm_eps)


def _set_shardings(decoder: Any, sequence: bool) -> None:
    if isinstance(decoder, Qwen3Model.Config):
        set_qwen3_sharding_config(decoder, enable_sp=sequence, enable_ep=False)
    else:
        set_llama3_sharding_config(decoder, enable_sp=sequence)


def _require_fit(config: Any, name: str, ranks: TitanRanks, parallel: TitanParallel) -> None:
    """Raise ModelError for a dimension of the model that the mesh cannot cut, with its number."""
    size, key = ranks.sizes.tensor, parallel.key_of("tensor")
    counts: Mapping[str, int] = {
        what: getattr(config, what) for what in ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    }
    for what, count in counts.items():
        if count % size:
            raise ModelError(f"{key} = {size} does not divide the {count} {what} of {name}")
    if ranks.vocabulary.share(config.vocab_size) * (size - 1) >= config.vocab_size:
        raise ModelError(f"{key} = {size}: {name} has only {config.vocab_size} tokens to share out")
