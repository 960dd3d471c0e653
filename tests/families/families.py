"""The families of the table in docs/families.md: each at a tiny size, with what sets its architecture apart.

Every one is built from the configuration class of transformers and written as a Hugging Face folder. Weights are moved
off their neutral values (norms of 1, biases of 0, sinks of 0), so that a part that is left out shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hone.models.loading import load_language_model, without_progress_bars
from hone.models.settings import BuildConfig, ModelConfig
from hone.models.tokenizer import load_tokenizer
from tests.families.types import save_tiny

# Heads of 32: the smallest that vLLM's attention on a CPU takes.
SIZES = {
    "hidden_size": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_size": 32,
    "mlp_size": 64,
    "max_positions": 128,
    "tie_embeddings": False,
}
HEADS = {"head_dim": 32}  # of `tiny` models, for vLLM
DELTA = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}  # of gated DeltaNet, as published models have
HIDDEN = {"hidden_size": 128}  # of those that have no size of a head of their own
CHANNELS = {"mamba_d_state": 16}  # of Mamba 2: in bfloat16 its convolution's kernel takes multiples of 32 channels
# The sizes of latent attention for which vLLM has a kernel on a CPU.
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 16, "v_head_dim": 16}
SIGMOID = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}  # entries of published configs that vLLM reads
WIDE = {"hidden_size": 64, "heads": 2, "head_size": None}  # where a configuration has no size of a head of its own
ROPE = {"rope_type": "default", "rope_theta": 1e4}


@dataclass(frozen=True)
class Family:
    """One row: an architecture of transformers, and what of it a tiny model should have."""

    architecture: str
    traits: str  # what sets it apart, for the table
    options: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, Any] = field(default_factory=dict)
    published: Mapping[str, Any] = field(default_factory=dict)  # in config.json beside what transformers' class has
    experts: bool = False
    tiny: bool = False  # the model of the table of all types (`types`), which has the special parts at such a size
    served: Mapping[str, Any] = field(default_factory=dict)  # options of a `tiny` model for vLLM's kernels

    def build_config(self) -> BuildConfig:
        sizes = {key: size for key, size in {**SIZES, **self.sizes}.items() if size is not None}
        return BuildConfig(**sizes, architecture=self.architecture, options=dict(self.options))


FAMILIES = {
    "Qwen2": Family("qwen2", "biases of q, k and v", sizes=WIDE),
    "Qwen2.5": Family("qwen2", "the same, tied head", sizes=WIDE | {"tie_embeddings": True}),
    "Qwen3": Family("qwen3", "norms of queries and keys, tied head", sizes={"tie_embeddings": True}),
    "Qwen3-MoE": Family(
        "qwen3_moe",
        "experts in every layer",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
        WIDE,
        experts=True,
    ),
    "Llama 3": Family(
        "llama",
        "rescaled rotary frequencies",
        {
            "rope_parameters": {
                **ROPE,
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "Mistral": Family("mistral", "a sliding window in every layer", {"sliding_window": 8}),
    "Gemma 2": Family(
        "gemma2",
        "soft-capped scores and logits, windows in every other layer",
        {
            "sliding_window": 8,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 16,
        },
        {"tie_embeddings": True},
    ),
    "Gemma 3": Family(
        "gemma3_text",
        "two rotary bases, windows in some layers",
        {
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 16,
        },
        {"tie_embeddings": True},
    ),
    "Phi-3": Family(
        "phi3",
        "fused q, k, v and fused gate, up; a sliding window",
        {"sliding_window": 8},
        WIDE,
    ),
    "Phi-4-mini": Family(
        "phi3",
        "partial and long rotary positions, tied head",
        {
            "sliding_window": None,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_theta": 1e4,
                "rope_type": "longrope",
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0 + 0.05 * i for i in range(12)],
                "long_factor": [1.0 + 0.5 * i for i in range(12)],
                "original_max_position_embeddings": 64,
            },
        },
        WIDE | {"tie_embeddings": True},
    ),
    "OLMo 2": Family(
        "olmo2",
        "norms after attention and MLP; of whole queries and keys",
        sizes=WIDE,
    ),
    "DeepSeek-V3": Family(
        "deepseek_v3",
        "latent attention with other sizes of keys and values, grouped and shared experts",
        {
            "kv_lora_rank": 512,  # with 64 rotary ones: the only sizes that vLLM's attention on a CPU has a kernel for
            "q_lora_rank": 32,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 4,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "rope_parameters": {
                **ROPE,
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
        {"heads": 2, "head_size": None},
        SIGMOID,
        experts=True,
    ),
    "gpt-oss": Family(
        "gpt_oss",
        "attention sinks, windows in every other layer, experts with biases",
        {
            "sliding_window": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                **ROPE,
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        },
        experts=True,
    ),
    "GLM-4": Family("glm4", "partial rotary positions, norms around attention and MLP"),
    "GLM-4-MoE": Family(
        "glm4_moe",
        "experts behind a dense layer, a shared expert, partial rotary positions",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "use_qk_norm": True,
        },
        WIDE,
        {"head_dim": 32},
        experts=True,
    ),
    "ERNIE 4.5 MoE": Family(
        "ernie4_5_moe",
        "routers and their biases in float32, shared experts behind a dense layer",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_layer_start_index": 1,
            "moe_num_shared_experts": 1,
        },
        WIDE,
        experts=True,
    ),
    "SmolLM3": Family(
        "smollm3", "a layer without positions", {"no_rope_layers": [1, 0], "no_rope_layer_interval": 2}, WIDE
    ),
    "OLMo 3": Family(
        "olmo3",
        "windows in every other layer, norms after attention and MLP",
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        WIDE,
    ),
    "EXAONE 4": Family(
        "exaone4",
        "windows with positions, whole attention without",
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        WIDE,
    ),
    "Seed-OSS": Family("seed_oss", "biases of q, k and v"),
    "MiniMax-M2": Family(
        "minimax_m2",
        "norms of whole queries and keys, partial rotary positions, sigmoid routers with a bias",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
        },
        published={"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
        experts=True,
    ),
    "GLM-4.7-Flash": Family(
        "glm4_moe_lite",
        "latent attention, experts behind a dense layer",
        experts=True,
        tiny=True,
        served=LATENT | SIGMOID | {"first_k_dense_replace": 1},
    ),
    "Llama 4": Family(
        "llama4_text",
        "chunked attention, layers without positions, a temperature by position",
        experts=True,
        tiny=True,
        served=HEADS | {"attention_chunk_size": 32, "num_experts_per_tok": 1},  # blocks of its cache; as published
    ),
    "DeepSeek-V3.2": Family(
        "deepseek_v32",
        "sparse attention: an indexer per layer",
        experts=True,
        tiny=True,
        served=LATENT | SIGMOID | {"index_head_dim": 128},
    ),
    "GLM-5": Family(
        "glm_moe_dsa",
        "sparse attention: layers share an indexer's choice",
        experts=True,
        tiny=True,
        served=LATENT | SIGMOID | {"index_head_dim": 128},
    ),
    "Gemma 3n": Family("gemma3n_text", "keys of earlier layers, embeddings per layer, AltUp", tiny=True, served=HEADS),
    "Gemma 4": Family(
        "gemma4_text",
        "two shapes of attention, keys of earlier layers, embeddings per layer",
        tiny=True,
        served=HEADS | {"global_head_dim": 64, "num_experts": None},
    ),
    "Qwen3.5": Family("qwen3_5_text", "gated DeltaNet in every other layer", tiny=True, served=HEADS | DELTA),
    "Qwen3.5-MoE": Family(
        "qwen3_5_moe_text", "the same with experts and a shared expert", experts=True, tiny=True, served=HEADS | DELTA
    ),
    "Qwen3-Next": Family(
        "qwen3_next", "gated DeltaNet, experts, a shared expert", experts=True, tiny=True, served=HEADS | DELTA
    ),
    "Kimi-Linear": Family(
        "kimi_linear", "KDA, latent attention without positions, experts", experts=True, tiny=True, served=LATENT
    ),
    "Nemotron-H": Family(
        "nemotron_h", "Mamba 2, experts, attention and an MLP, a layer each", experts=True, tiny=True, served=HEADS
    ),
    "LFM2": Family(
        "lfm2",
        "short convolutions in every other layer",
        tiny=True,
        served=HIDDEN | {"conv_dim": 128, "block_dim": 128},  # entries of published configs
    ),
    "Granite 4": Family(
        "granitemoehybrid",
        "Mamba 2, experts and a shared MLP",
        experts=True,
        tiny=True,
        served=HIDDEN | CHANNELS | {"mamba_d_head": 64},
    ),
    "Falcon-H1": Family("falcon_h1", "Mamba 2 beside attention in every layer", tiny=True, served=HIDDEN | CHANNELS),
    "Jamba": Family("jamba", "Mamba 1, experts in some layers", experts=True, tiny=True, served=HIDDEN),
    "OLMo-Hybrid": Family("olmo_hybrid", "gated DeltaNet with separate projections", tiny=True, served=HIDDEN | DELTA),
}


def save(
    family: Family,
    folder: Path,
    seed: int = 0,
    change: Callable[[str, torch.Tensor], None] | None = None,
    served: bool = False,
) -> Path:
    """Write the family's model and tokenizer into `folder`; `change` edits each weight in place before.

    A `tiny` model has one seed, and takes no `change`; `served`: with heads that vLLM's kernels take.
    """
    if family.tiny:
        return save_tiny(family.architecture, folder, {**family.options, **(family.served if served else {})})
    build = family.build_config().model_copy(update={"seed": seed})
    model = load_language_model(ModelConfig(build=build))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in {tensor.data_ptr(): tensor for tensor in model.state_dict().values()}.values():
            if tensor.is_floating_point():
                tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in model.state_dict().items() if change is not None else ():
            change(name, tensor)
    for name, entry in family.published.items():
        setattr(model.config, name, entry)
    with without_progress_bars():
        model.save_pretrained(folder)
    load_tokenizer(ModelConfig(build=build)).save_pretrained(folder)
    return folder
