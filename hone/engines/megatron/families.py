"""Which Hugging Face models the engine builds: their config in Megatron-Core's terms, or an error that says why not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from hone.engines.megatron.mesh import MegatronRanks
from hone.engines.megatron.settings import MegatronParallel
from hone.models.errors import ModelError

DENSE = ("llama", "mistral", "qwen2", "qwen3")
MIXTURES = ("qwen3_moe",)
FAMILIES = (*DENSE, *MIXTURES)


@dataclass
class ModelShape(TransformerConfig):  # type: ignore[misc]  # Megatron has no types
    """Megatron's config, and what hone's modules need besides."""

    windows: tuple[int | None, ...] = ()  # of each layer's attention; None: a token sees all before it
    padding_token: int | None = None  # its row of the embedding gets no gradient as an input, as in transformers


def model_shape(
    config: Any, name: str, ranks: MegatronRanks, parallel: MegatronParallel, compute: torch.dtype, device: str
) -> ModelShape:
    """Translate a transformers config. Raises ModelError naming what the engine or the mesh cannot do."""
    _require_family(config, name)
    _require_fit(config, name, ranks, parallel)
    sizes = ranks.sizes
    heads = config.num_attention_heads
    return ModelShape(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=head_size(config),
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        add_bias_linear=False,
        add_qkv_bias=config.model_type == "qwen2",
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        qk_layernorm=config.model_type.startswith("qwen3"),
        params_dtype=compute,
        pipeline_dtype=compute,
        bf16=compute == torch.bfloat16,
        tensor_model_parallel_size=sizes.tensor,
        sequence_parallel=sizes.sequence,
        pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=sizes.virtual if sizes.virtual > 1 else None,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
        expert_tensor_parallel_size=1,
        use_cpu_initialization=device == "cpu",
        perform_initialization=False,
        calculate_per_token_loss=True,  # gradients are plain sums: the loss weights have the denominator
        variable_seq_lengths=sizes.virtual == 1,
        moe_token_dispatcher_type="alltoall",  # of which megatron-core takes variable lengths, also without experts
        batch_p2p_comm=False,
        overlap_p2p_comm=False,
        deallocate_pipeline_outputs=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        windows=_windows(config),
        padding_token=config.pad_token_id,
        **_mixture(config),
    )


def _mixture(config: Any) -> dict[str, Any]:
    """The settings of a mixture of experts: the router computes in float32, and tokens are never dropped."""
    if config.model_type not in MIXTURES:
        return {}
    return {
        "num_moe_experts": config.num_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_router_load_balancing_type": "none",
        "moe_router_pre_softmax": not config.norm_topk_prob,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
    }


def head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _require_family(config: Any, name: str) -> None:
    kind = config.model_type
    if kind not in FAMILIES:
        raise ModelError(
            f"{name} is a {kind!r} model, and the megatron engine builds {', '.join(FAMILIES)}; use backend fsdp2"
        )
    wanted = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    if kind in MIXTURES:
        wanted |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    for key, value in wanted.items():
        found = getattr(config, key, value)
        if (found or value) != value:
            raise ModelError(
                f"{name} has {key}={found!r} in its config.json, and the megatron engine computes {value!r} only; "
                "use backend fsdp2"
            )


def _require_fit(config: Any, name: str, ranks: MegatronRanks, parallel: MegatronParallel) -> None:
    """Raise ModelError for a dimension of the model that the mesh cannot cut, with its number."""
    sizes, key = ranks.sizes, parallel.key_of
    for what in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if (count := getattr(config, what)) % sizes.tensor:
            raise ModelError(f"{key('tensor')} = {sizes.tensor} does not divide the {count} {what} of {name}")
    share = ranks.vocabulary_share(config.vocab_size)
    if share * (sizes.tensor - 1) >= config.vocab_size:
        raise ModelError(f"{key('tensor')} = {sizes.tensor}: {name} has only {config.vocab_size} tokens to share out")
    queries, pairs = config.num_attention_heads // sizes.tensor, config.num_key_value_heads // sizes.tensor
    if queries % sizes.context or (pairs % sizes.context and sizes.context % pairs):
        raise ModelError(
            f"{key('context')} = {sizes.context}: the {queries} attention heads and {pairs} key-value heads of {name} "
            f"on each of {sizes.tensor} tensor ranks cannot be shared out"
        )
    parts = sizes.pipeline * sizes.virtual
    if config.num_hidden_layers % parts:
        raise ModelError(
            f"{key('pipeline')} = {sizes.pipeline} x {key('virtual_pipeline')} = {sizes.virtual} does not divide the "
            f"{config.num_hidden_layers} layers of {name}"
        )
    _require_experts_fit(config, name, ranks, parallel)


def _require_experts_fit(config: Any, name: str, ranks: MegatronRanks, parallel: MegatronParallel) -> None:
    sizes, key = ranks.sizes, parallel.key_of
    experts = config.num_experts if config.model_type in MIXTURES else 0
    if sizes.expert > 1 and not experts:
        raise ModelError(f"{key('expert')} = {sizes.expert}: {name} has no experts; leave it at 1")
    if experts % sizes.expert:
        raise ModelError(f"{key('expert')} = {sizes.expert} does not divide the {experts} experts of {name}")
    if experts and sizes.tensor > 1 and (not sizes.sequence or sizes.expert % sizes.tensor):
        raise ModelError(
            f"{key('tensor')} = {sizes.tensor}: a mixture of experts ({name}) needs {key('sequence')} = true and "
            f"{key('expert')} as a multiple of tensor; found expert = {sizes.expert}"
        )
