"""A tiny model of every causal model type of transformers, for the table of all types in docs/families.md.

A size is given under every name that configuration classes have for it. What else a class needs, or what keeps its
special parts alive at such a size, stands in `OPTIONS`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hone.models.attention.support import obstacle
from hone.models.loading import without_progress_bars
from hone.models.settings import BuildConfig, ModelConfig
from hone.models.tokenizer import load_tokenizer
from hone.models.vision.model import auto_class

TYPES = sorted(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING)
VOCABULARY = 104
WINDOW = 6
MOST_WEIGHTS = 20_000_000
_SIZES: Mapping[int, str] = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input",
    4: "num_hidden_layers n_layer n_layers num_layers decoder_layers num_attention_heads n_head n_heads num_heads "
    "decoder_attention_heads encoder_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts "
    "zero_expert_num pruned_heads depth rotary_dim",
    32: "hidden_size n_embd d_model word_embed_proj_dim embedding_size input_embedding_size out_hidden_size",
    48: "intermediate_size n_inner ffn_dim decoder_ffn_dim ffn_hidden_size dense_intermediate_size dff d_inner dim_ff "
    "intermediate_size_mlp encoder_ffn_dim",
    128: "max_position_embeddings n_positions max_seq_len",
    2: "num_key_value_heads num_experts_per_tok moe_k n_group moe_topk spatial_merge_size "
    "temporal_patch_size linear_num_key_heads linear_num_value_heads linear_num_heads laurel_rank",
    8: "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim d_kv d_head dim_head attention_head_dim "
    "hidden_size_per_layer_input linear_key_head_dim linear_value_head_dim linear_head_dim index_block_size",
    16: "index_n_heads index_head_dim "
    "kv_lora_rank q_lora_rank moe_intermediate_size shared_expert_intermediate_size router_hidden_size patch_size "
    "moe_shared_expert_intermediate_size expert_ffn_hidden_size shared_intermediate_size num_position_embeddings",
    WINDOW: "sliding_window index_topk local_attention attention_chunk_size window_size sliding_window_size",
    1: "encoder_layers first_k_dense_replace topk_group bos_token_id",
}
_NAMED: dict[str, Any] = {name: size for size, names in _SIZES.items() for name in names.split()} | {
    "pad_token_id": 0,
    "eos_token_id": 2,
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_expand": 2}
_LATENT = {"num_key_value_heads": 4}  # keys are expanded to every head
_EACH = ["sliding_attention", "full_attention"]
_PER_LAYER_KEYS = {"layer_types": _EACH * 2, "num_kv_shared_layers": 2}  # layers 2 and 3 read the keys of 0 and 1
_STATES = {"layer_types": ["linear_attention", "full_attention"] * 2}
_SOUND = {"text_encoder": {"model_type": "t5"}, "audio_encoder": {"model_type": "encodec"}, "decoder": {}}
_IMAGES = {"patch_size": 2, "mm_embed_dim": 32, "mm_posemb_size": 8, "output_proj_dims": 32}
OPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"), _LATENT),
    **dict.fromkeys(("glm_moe_dsa", "longcat_flash", "minicpm3", "youtu", "hy_v4", "mistral4"), _LATENT),
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "layer_types": _EACH * 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]} for kind in _EACH
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v4": {"o_lora_rank": 8, "o_groups": 2},
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "gemma3n_text": _PER_LAYER_KEYS,
    "gemma4_text": _PER_LAYER_KEYS | {"global_head_dim": 16},
    "gemma4_unified_text": _PER_LAYER_KEYS | {"global_head_dim": 16},
    "gemma4_unified_vision": _IMAGES,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "got_ocr2": {
        "text_config": {
            "model_type": "qwen2",
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 48,
        }
    },
    "granitemoehybrid": {**_MAMBA, **_STATES},
    "inkling_text": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "d_rel": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4},
    "kimi_linear": {**_LATENT, **_STATES},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "llama4_text": {
        "layer_types": ["chunked_attention", "full_attention"] * 2,
        "no_rope_layers": [1, 0] * 2,
        "floor_scale": 4,  # the queries' temperature then changes within a sequence
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2},
    "mimo_v2_flash": {"v_head_dim": 12, "layer_types": _EACH * 2},
    "minimax": _STATES,
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "musicgen": _SOUND,
    "musicgen_melody": _SOUND,
    "nemotron_h": {
        "layer_types": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
    },
    "olmo_hybrid": _STATES,
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), _STATES),
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 8,
        "ngram_vocab_size_base": 100,
        "split_ngram_parts": 1,
    },
    "recurrent_gemma": {"lru_width": 32, "block_types": ["recurrent", "attention"]},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 16]},
    "zamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "num_hidden_layers": 6},
    "zamba2": {"mamba_d_state": 8, "layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(kind: str, options: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """The configuration of a tiny model of this type; `options` replaces values of `OPTIONS`."""
    asked = {**OPTIONS.get(kind, {}), **(options or {})}
    config: PreTrainedConfig = CONFIG_MAPPING[kind](**_values(CONFIG_MAPPING[kind], asked))
    return config


def _values(cls: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of a configuration class, and of the configurations inside it."""
    fields = {field.name for field in dataclasses.fields(cls)}
    aliases = {alias: name for alias, name in cls.attribute_map.items() if alias not in fields}
    values = {aliases.get(name, name): size for name, size in _NAMED.items() if aliases.get(name, name) in fields}
    for part, inner in getattr(cls, "sub_configs", {}).items():
        if dataclasses.is_dataclass(inner) and part not in options:
            kind = getattr(inner, "model_type", "")
            values[part] = inner(**_values(inner, OPTIONS.get(kind, {}))).to_dict()
    return values | copy.deepcopy(dict(options))  # classes take entries out of them


def save_tiny(kind: str, folder: Path, options: Mapping[str, Any] | None = None) -> Path:
    """Write a tiny model with random weights, none of which has a neutral value; `options`: values of its config.

    Its file of weights is empty if hone refuses the type by its configuration, or if transformers cannot build it here.
    """
    config = tiny_config(kind, options)
    try:
        model = None if obstacle(config) else _random(kind, config)
    except ImportError:  # Gemma 3n's vision tower is in another package
        model = None
    with without_progress_bars():
        (config if model is None else model).save_pretrained(folder)
    if model is None:
        save_file({}, folder / "model.safetensors", {"format": "pt"})
    load_tokenizer(ModelConfig(build=BuildConfig())).save_pretrained(folder)
    return folder


def _random(kind: str, config: PreTrainedConfig) -> Any:
    with torch.device("meta"):
        size = sum(weight.numel() for weight in auto_class(kind).from_config(config).parameters())
    if size > MOST_WEIGHTS:
        raise ValueError(f"a tiny {kind!r} has {size} weights; give smaller sizes in OPTIONS")
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = auto_class(kind).from_config(config, dtype=torch.float32)
        for weight in model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.15)
            else:
                weight += 0.1 * torch.randn_like(weight)
    return model
