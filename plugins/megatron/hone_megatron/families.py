"""Hugging Face configs in Megatron-Core's terms, or an error that says why not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

from hone.engines.rebuilt.configs import DENSE as COMPUTED
from hone.engines.rebuilt.configs import head_size, padding_token, require_computed, require_family, windows_of
from hone.models.errors import ModelError
from hone.models.routing import expert_count
from hone_megatron.mesh import MegatronRanks
from hone_megatron.modules.latent import Latent
from hone_megatron.modules.router import Routes
from hone_megatron.settings import MegatronParallel

DENSE = ("llama", "mistral", "qwen2", "qwen3")
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss")
FAMILIES = (*DENSE, *MIXTURES)
_QKV_BIAS = {"qwen2_moe": "qkv_bias", "glm4_moe": "attention_bias"}  # family -> the key that gives q, k and v biases


@dataclass
class ModelShape(TransformerConfig):  # type: ignore[misc]  # Megatron has no types
    """Megatron's config, and what hone's modules need besides."""

    has_sinks: bool = False  # one more attention score for each head, which takes weight and gives nothing
    clamps: tuple[float, float] | None = None  # slope and limit of the gates of gpt-oss's experts
    latent: Latent | None = None  # sizes of latent attention, in models that have it
    windows: tuple[int | None, ...] = ()  # of each layer's attention; None: a token sees all before it
    mixtures: int = 0  # how many layers are mixtures of experts
    routes: Routes | None = None  # of their routers
    padding_token: int | None = None  # its row of the embedding gets no gradient as an input, as in transformers

    add_bias_linear: bool = False

    def __post_init__(self) -> None:
        # Megatron refuses biases of experts that ranks share, because its own modules would add them on each rank.
        has_biases = self.add_bias_linear
        self.add_bias_linear = False
        super().__post_init__()
        self.add_bias_linear = has_biases


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
        add_bias_linear=config.model_type == "gpt_oss",
        add_qkv_bias=config.model_type == "qwen2" or bool(getattr(config, _QKV_BIAS.get(config.model_type, ""), None)),
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        qk_layernorm=config.model_type.startswith("qwen3") or bool(getattr(config, "use_qk_norm", None)),
        params_dtype=compute,
        pipeline_dtype=compute,
        bf16=compute == torch.bfloat16,
        tensor_model_parallel_size=sizes.tensor,
        sequence_parallel=sizes.sequence,
        pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=sizes.virtual if sizes.virtual > 1 else None,
        pipeline_model_parallel_layout=_layout(parallel.layers_of_parts(config.num_hidden_layers, name)),
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
        expert_tensor_parallel_size=sizes.expert_tensor,
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
        cuda_graph_scope=[],  # the default, "full", is a deprecated name of this and warns
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        has_sinks=config.model_type == "gpt_oss",
        latent=_latent(config) if config.model_type == "deepseek_v3" else None,
        windows=windows_of(config),
        padding_token=padding_token(config),
        **_mixture(config),
    )


def _layout(layers: Sequence[int]) -> list[list[str]] | None:
    """The parts of the model in Megatron's terms; None: there is only one."""
    parts = [["decoder"] * count for count in layers]
    return [["embedding", *parts[0]], *parts[1:-1], [*parts[-1], "loss"]] if len(parts) > 1 else None


def _mixture(config: Any) -> dict[str, Any]:
    """The settings of a mixture of experts: the router computes in float32, and tokens are never dropped."""
    if not mixture_layers(config):
        return {}
    return {
        "mixtures": mixture_layers(config),
        "routes": _routes(config),
        "clamps": (config.swiglu_alpha, config.swiglu_limit) if config.model_type == "gpt_oss" else None,
        "num_moe_experts": expert_count(config),
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": _expert_size(config),
        "moe_shared_expert_intermediate_size": _shared_expert_size(config) or None,
        "moe_shared_expert_gate": config.model_type == "qwen2_moe",
        "moe_router_load_balancing_type": "none",
        "moe_router_pre_softmax": True,  # megatron-core wants it of routers that take one expert
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
    }


def mixture_layers(config: Any) -> int:
    """Return the number of layers, the last ones, that are mixtures of experts."""
    dense = getattr(config, "first_k_dense_replace", None) or 0
    return max(int(config.num_hidden_layers) - dense, 0) if config.model_type in MIXTURES else 0


def _expert_size(config: Any) -> int:
    """The inner features of each expert."""
    return int(getattr(config, "moe_intermediate_size", None) or config.intermediate_size)


def _shared_expert_size(config: Any) -> int:
    if config.model_type == "qwen2_moe":
        return int(config.shared_expert_intermediate_size)
    count = getattr(config, "n_shared_experts", None)
    return int(count * config.moe_intermediate_size) if count else 0


def _routes(config: Any) -> Routes:
    if hasattr(config, "n_group"):
        return Routes("sigmoid", config.norm_topk_prob, config.routed_scaling_factor, config.n_group, config.topk_group)
    if config.model_type == "gpt_oss":
        return Routes("chosen")
    return Routes(normalises=config.model_type == "mixtral" or config.norm_topk_prob)


def _latent(config: Any) -> Latent:
    scale = float(yarn_apply_mscale(config.rope_parameters, config.qk_head_dim**-0.5))
    return Latent(
        config.q_lora_rank,
        config.kv_lora_rank,
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
        bool(config.rope_interleave),
        scale,
    )


def _require_family(config: Any, name: str) -> None:
    require_family(config, name, "megatron", FAMILIES)
    wanted = {**COMPUTED, "router_jitter_noise": 0.0, "decoder_sparse_step": 1, "mlp_only_layers": []}
    if config.model_type == "gpt_oss":
        wanted["attention_bias"] = True
    wanted.pop(_QKV_BIAS.get(config.model_type, ""), None)
    require_computed(config, name, "megatron", wanted)


def _require_fit(config: Any, name: str, ranks: MegatronRanks, parallel: MegatronParallel) -> None:
    """Raise ModelError for a dimension of the model that the mesh cannot cut, with its number."""
    _require_experts_fit(config, name, ranks, parallel)
    sizes, key = ranks.sizes, parallel.key_of
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    counts = {name: getattr(config, name) for name in names}
    for what, count in (counts | {"features of shared experts": _shared_expert_size(config)}).items():
        if count % sizes.tensor:
            raise ModelError(f"{key('tensor')} = {sizes.tensor} does not divide the {count} {what} of {name}")
    share = ranks.vocabulary.share(config.vocab_size)
    if share * (sizes.tensor - 1) >= config.vocab_size:
        raise ModelError(f"{key('tensor')} = {sizes.tensor}: {name} has only {config.vocab_size} tokens to share out")
    queries, pairs = config.num_attention_heads // sizes.tensor, config.num_key_value_heads // sizes.tensor
    if queries % sizes.context or (pairs % sizes.context and sizes.context % pairs):
        raise ModelError(
            f"{key('context')} = {sizes.context}: the {queries} attention heads and {pairs} key-value heads of {name} "
            f"on each of {sizes.tensor} tensor ranks cannot be shared out"
        )


def _require_experts_fit(config: Any, name: str, ranks: MegatronRanks, parallel: MegatronParallel) -> None:
    sizes, key = ranks.sizes, parallel.key_of
    experts = expert_count(config) if mixture_layers(config) else 0
    for dimension in ("expert", "expert_tensor"):
        if getattr(sizes, dimension) > 1 and not experts:
            raise ModelError(f"{key(dimension)} = {getattr(sizes, dimension)}: {name} has no experts; leave it at 1")
    if experts % sizes.expert:
        raise ModelError(f"{key('expert')} = {sizes.expert} does not divide the {experts} experts of {name}")
    if experts and _expert_size(config) % sizes.expert_tensor:
        raise ModelError(
            f"{key('expert_tensor')} = {sizes.expert_tensor} does not divide the {_expert_size(config)} features of "
            f"each expert of {name}"
        )
    if experts and sizes.tensor > 1 and not sizes.sequence:
        raise ModelError(
            f"{key('tensor')} = {sizes.tensor}: a mixture of experts ({name}) needs {key('sequence')} = true, so that "
            "each tensor rank sends other tokens to the experts"
        )
