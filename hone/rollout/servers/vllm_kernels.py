"""Refuses, before a server starts, the models for which vLLM's build for CPUs has no kernel.

Each fact was found by running vLLM 0.32.0 (`docs/families.md`). Does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hone.config import ConfigError
from hone.models.attention.support import carries_state
from hone.models.routing import expert_count
from hone.platforms.base import current_platform
from hone.rollout.servers.shape import ServerRanks

CPU_LACKS: Mapping[str, str] = {  # type of model -> what there is no kernel for
    **dict.fromkeys(("falcon_mamba", "jamba", "mamba"), "Mamba 1"),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), "sparse attention with an indexer"),
    "kimi_linear": "KDA",
    "olmo_hybrid": "gated DeltaNet with separate projections",
}
CPU_BFLOAT16 = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")  # its gated DeltaNet on a CPU takes bfloat16 only
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # vllm/v1/attention/backends/cpu_attn.py
CHANNELS = 32  # of a convolution, which the kernel in bfloat16 takes at once
PACKED_WIDTH = 4  # of the only convolution that this kernel computes
_PLAIN = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
MAMBA_2: Mapping[str, tuple[str, ...]] = {  # heads, their size, groups, their state, width of the convolution
    **dict.fromkeys(("falcon_h1", "granitemoehybrid"), _PLAIN),
    "mamba2": ("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel"),
    "nemotron_h": ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
    "zamba2": ("n_mamba_heads", "mamba_headdim", "mamba_ngroups", "mamba_d_state", "mamba_d_conv"),
}


def check_fits(shape: ServerRanks, config: Any, options: Mapping[str, Any], model: str) -> None:
    """Raise ConfigError for what vLLM cannot compute with a model of this transformers configuration."""
    if shape.data > 1 and not expert_count(config):
        raise ConfigError(
            f"rollout.engine.data_parallel_size = {shape.data}: {model} (model.path) has no experts, so its data "
            "parallel ranks would be servers that share nothing; set rollout.replicas instead"
        )
    if current_platform().device != "cpu":
        return
    if options.get("enable_expert_parallel"):
        raise ConfigError(
            "rollout.engine.enable_expert_parallel: on a CPU, vLLM's kernel reads experts that the rank does not "
            "have, which ends in a segmentation fault; leave it out"
        )
    _check_layers(config, options["dtype"], model)
    _check_convolution(shape, config, options["dtype"], model)
    for size in head_sizes(config) - set(CPU_HEAD_SIZES):
        known = ", ".join(map(str, CPU_HEAD_SIZES))
        raise ConfigError(
            f"rollout.backend=vllm: on a CPU, vLLM supports the attention head sizes {known}, and {model} "
            f"(model.path) has {size} (head_dim in its config.json): set rollout.backend=builtin, or choose "
            "another model (model.build.head_size=32 for one that is built)"
        )


def _check_layers(config: Any, dtype: str, model: str) -> None:
    kind = config.model_type
    lacks = CPU_LACKS.get(kind)
    if kind == "nemotron_h" and "moe" in (config.layer_types or ()):
        lacks = "experts without gates"
    if lacks:
        raise ConfigError(
            f"rollout.backend=vllm: on a CPU, vLLM has no kernel for {lacks}, and {model} (model.path) is of type "
            f"{kind!r}: set rollout.backend=builtin, or run it on a GPU"
        )
    if kind in CPU_BFLOAT16 and dtype != "bfloat16":
        raise ConfigError(
            f"rollout.backend=vllm: on a CPU, vLLM computes gated DeltaNet in bfloat16 only, and {model} (model.path) "
            f"would be served in {dtype}: set actor.compute_dtype=bfloat16, or rollout.backend=builtin"
        )


def _check_convolution(shape: ServerRanks, config: Any, dtype: str, model: str) -> None:
    """vLLM packs the convolutions of Mamba 2 in bfloat16, where the processor has instructions for it."""
    channels = convolution_channels(config, shape.tensor)
    if dtype != "bfloat16" or channels % CHANNELS == 0 or current_platform().why_bfloat16_is_slow():
        return
    ranks = f" on each of {shape.tensor} ranks" if shape.tensor > 1 else ""
    raise ConfigError(
        f"rollout.backend=vllm: on a CPU with instructions for bfloat16, vLLM's convolution takes a multiple of "
        f"{CHANNELS} channels, and a Mamba 2 layer of {model} (model.path) has {channels}{ranks}: set "
        "actor.compute_dtype=float32, or rollout.backend=builtin"
    )


def convolution_channels(config: Any, ranks: int = 1) -> int:
    """Channels that a rank has of the convolution of a Mamba 2 layer; 0 where vLLM packs none."""
    if config.model_type not in MAMBA_2 or not carries_state(config):  # Granite 4 of attention alone
        return 0
    heads, size, groups, state, width = (int(getattr(config, name)) for name in MAMBA_2[config.model_type])
    if width != PACKED_WIDTH:
        return 0
    return (heads * size + 2 * max(groups, ranks) * state) // ranks  # a single group is copied to every rank


def head_sizes(config: Any) -> set[int]:
    """The sizes of attention heads by a transformers configuration; empty for latent attention and for none at all."""
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]  # Gemma 4
    if getattr(layers[0], "kv_lora_rank", None):
        return set()
    counts = [(one, getattr(one, "num_attention_heads", None)) for one in layers]
    return {int(getattr(one, "head_dim", None) or one.hidden_size // heads) for one, heads in counts if heads}
