"""Describe a model and estimate its memory from its config and file headers, without reading any weights.

config.json --transformers, meta device--> empty model --> counts, shapes, layers
            --formulas-------------------> bytes of weights, gradients, optimizer, activations, KV cache
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig

from hone.engines.lora.targets import default_targets
from hone.models.attention.indexed import indexers
from hone.models.attention.stateful import state_layers, unknown_states
from hone.models.attention.support import obstacle
from hone.models.errors import ModelError
from hone.models.loading import check_model_source, folder_of
from hone.models.quantised import method_of
from hone.models.settings import ModelConfig
from hone.models.value_head import VALUE_HEAD_FILE, is_classifier
from hone.models.vision.model import auto_class
from hone.rollout.builtin.generic import AttentionShape, attention_shapes

_SHARED_SIZES = ("qk_nope_head_dim", "qk_rope_head_dim")  # latent attention (DeepSeek): a key is both, concatenated
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "top_k_experts")


@dataclass(frozen=True, slots=True)
class Files:
    """The weight files on disk."""

    count: int  # 0: unknown until they are downloaded
    bytes: int
    dtype: str  # of most elements; empty: unknown
    quantised: str  # the method; empty: not quantised
    head: str  # "language model", "value head" or "sequence classifier"


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The dimensions and features of a language model."""

    family: str  # model_type
    architecture: str  # class in transformers
    parameters: int  # tied weights counted once
    active: int  # parameters used for one token
    embedding: int  # parameters of token embeddings and head
    largest_layer: int
    layers: int
    hidden: int
    attention: tuple[AttentionShape, ...]  # of each attention, in the order of the layers
    index_size: int  # numbers that the indexers of sparse attention cache for a token; 0: it has none
    mlp: int  # inner width for one token, summed over its experts
    vocabulary: int
    context: int  # 0: not in the config
    window: int  # shortest sliding window; 0: none
    experts: int  # per layer; 0: dense
    experts_per_token: int
    tied: bool
    stateful: bool  # layers carry a state from token to token
    states: tuple[str, ...]  # their classes, if hone can let them see one sequence at a time
    obstacle: str  # why packed attention cannot compute it; see `hone.models.attention.support`
    tensor_plan: bool  # transformers has a tensor-parallel plan
    expert_plan: bool
    linear: tuple[tuple[str, int, int, int], ...]  # (last name, count, inputs, outputs), without the head
    adapted: tuple[str, ...]  # last names of the layers that LoRA adapts by default
    unadapted: dict[str, tuple[str, ...]]  # reason -> names of linear layers that it cannot adapt
    expert_matrices: tuple[str, ...]  # fused: [experts, inputs, outputs]
    files: Files

    def lora_parameters(self, rank: int) -> int:
        """Parameters of an adapter on every linear layer but the head."""
        return sum(count * rank * (inputs + outputs) for _, count, inputs, outputs in self.linear)

    @property
    def linear_parameters(self) -> int:
        """Parameters of every linear layer but the head, without biases."""
        return sum(count * inputs * outputs for _, count, inputs, outputs in self.linear)

    def kv_bytes_per_token(self, width: int = 2) -> int:
        """Size of the built-in engine's KV cache per token; it caches every layer, windowed or not."""
        pairs = sum(one.kv_heads * (one.key_size + one.value_size) for one in self.attention if one.cached)
        return (pairs + self.index_size) * width


def examine(model: ModelConfig) -> Anatomy:
    """Describe a model. Raises ModelError for a model that hone would not load."""
    stored = check_model_source(model)
    folder = folder_of(model, weights=False)
    config: Any = None
    reason = ""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
        reason = obstacle(config)  # as a run asks; building may change the config
        with torch.device("meta"):
            empty = auto_class(config.model_type).from_config(config, trust_remote_code=model.trust_remote_code)
    except (ValueError, KeyError, ImportError, AttributeError, TypeError) as error:
        found = f"cannot be trained: {reason}" if reason else f"cannot be built by transformers: {_line(error)}"
        raise ModelError(f"model.path {model.path!r} {found}") from error
    empty.tie_weights()
    reason = reason or obstacle(config, type(empty)) or unknown_states(empty)
    if reason and getattr(empty.config.get_text_config(), "num_hidden_layers", None) is None:
        raise ModelError(f"model.path {model.path!r} cannot be trained: {reason}")
    return _measured(empty, reason, _files(folder, stored, config))


def _layers(text: Any) -> int:
    """Number of layers of a decoder. Raises ModelError."""
    if getattr(text, "num_hidden_layers", None) is None:
        raise ModelError(f"{text.model_type} is made of several models: its config.json has no num_hidden_layers")
    return int(text.num_hidden_layers)


def _measured(model: Any, reason: str, files: Files) -> Anatomy:
    text = model.config.get_text_config()
    sizes = {name: weight.numel() for name, weight in model.named_parameters()}
    embedding = {id(module.weight): module.weight.numel() for module in _ends(model)}
    experts, chosen = _experts(text)
    fused = [name for name, weight in model.named_parameters() if ".experts." in name and weight.dim() == 3]
    idle = sum(sizes[name] for name in fused) * (1 - chosen / experts) if experts else 0
    states = tuple(sorted({type(layer).__name__ for layer in state_layers(model).values()}))
    adapted, unadapted = default_targets(model)
    return Anatomy(
        family=model.config.model_type,
        architecture=type(model).__name__,
        parameters=sum(sizes.values()),
        active=round(sum(sizes.values()) - idle),
        embedding=sum(embedding.values()),
        largest_layer=max(_layer_sizes(sizes).values(), default=0),
        layers=_layers(text),
        hidden=text.hidden_size,
        attention=(() if reason else attention_shapes(model)) or _from_config(text),
        index_size=sum(one.head_dim for one in indexers(model)),
        mlp=_inner_width(text, chosen),
        vocabulary=text.vocab_size,
        context=getattr(text, "max_position_embeddings", 0) or 0,
        window=_window(text),
        experts=experts,
        experts_per_token=chosen,
        tied=len(embedding) == 1,
        stateful=bool(states or getattr(model, "_is_stateful", False)),
        states=states,
        obstacle=reason,
        tensor_plan=any(".layers." in f".{key}" for key in model.tp_plan or {}),
        expert_plan="ep_dispatch_experts" in (model.ep_plan or {}).values(),
        linear=tuple(_linear_layers(model)),
        adapted=tuple(sorted({path.rpartition(".")[2] for path in adapted})),
        unadapted={
            why: tuple(sorted({".".join(path.split(".")[-2:]) for path, one in unadapted.items() if one == why}))
            for why in sorted(set(unadapted.values()))
        },
        expert_matrices=tuple(sorted({name.rpartition(".")[2] for name in fused})),
        files=files,
    )


def _ends(model: Any) -> Iterator[Any]:
    yield model.get_input_embeddings()
    if model.get_output_embeddings() is not None:
        yield model.get_output_embeddings()


def _experts(text: Any) -> tuple[int, int]:
    """Routed experts per layer, and experts per token."""
    source = getattr(text, "ffn_config", None) or text  # DBRX has them in a config of their own
    count = next((found for name in _EXPERTS if (found := getattr(source, name, 0))), 0)
    chosen = next((found for name in _CHOSEN if (found := getattr(source, name, 0))), 0)
    return int(count), int(chosen) if count else 0


def _from_config(text: Any) -> tuple[AttentionShape, ...]:
    """Shapes of attention where the model cannot be run without weights; all layers are alike in such models."""
    heads = getattr(text, "num_attention_heads", None) or 0
    parts = [int(getattr(text, name, None) or 0) for name in _SHARED_SIZES]
    size = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else 0)
    key, value = (sum(parts), int(text.v_head_dim)) if all(parts) else (size, size)
    one = AttentionShape(heads, getattr(text, "num_key_value_heads", None) or heads, key, value, cached=True)
    return (one,) * (text.num_hidden_layers if heads else 0)


def _window(text: Any) -> int:
    kinds = getattr(text, "layer_types", None)
    slides = "sliding_attention" in kinds if kinds else getattr(text, "use_sliding_window", True)
    return int(getattr(text, "sliding_window", None) or 0) if slides else 0


def _inner_width(text: Any, chosen: int) -> int:
    width = getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * text.hidden_size
    if not isinstance(width, int):  # of each layer (Gemma 3n)
        width = sum(width) // len(width)
    if not chosen:
        return int(width)
    each = getattr(text, "moe_intermediate_size", None) or width
    return int(each) * (chosen + int(getattr(text, "n_shared_experts", 0) or 0))


def _layer_sizes(sizes: dict[str, int]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for name, size in sizes.items():
        before, found, after = name.partition(".layers.")
        if found:
            key = f"{before}.{after.split('.')[0]}"
            totals[key] = totals.get(key, 0) + size
    return totals


def _linear_layers(model: Any) -> Iterator[tuple[str, int, int, int]]:
    head = model.get_output_embeddings()
    counts: dict[tuple[str, int, int], int] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            kind = (path.rpartition(".")[2], module.in_features, module.out_features)
            counts[kind] = counts.get(kind, 0) + 1
    for (name, inputs, outputs), count in counts.items():
        yield name, count, inputs, outputs


def _files(folder: Path, stored: dict[str, Any], config: Any) -> Files:
    """Describe the weight files from names and headers; for a model that is still on a hub, from its index."""
    index = folder / "model.safetensors.index.json"
    paths = [path for path in sorted(folder.glob("*.safetensors")) if path.name != VALUE_HEAD_FILE]
    count, size = len(paths), sum(path.stat().st_size for path in paths)
    if index.is_file():
        listed = json.loads(index.read_text(encoding="utf-8"))
        count = len(set(listed["weight_map"].values()))
        size = int(listed.get("metadata", {}).get("total_size", size))
    dtype = str(getattr(config, "dtype", None) or "").removeprefix("torch.")
    if paths:
        dtype = _dtype_in(paths[0]) or dtype
    head = "language model"
    if is_classifier(stored):
        head = "sequence classifier"
    elif (folder / VALUE_HEAD_FILE).is_file():
        head = "value head"
    return Files(count, size, dtype, method_of(stored), head)


def _dtype_in(path: Path) -> str:
    """The dtype of most elements of a file, from its header."""
    totals: dict[str, int] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  a file, not a dict
                part = file.get_slice(name)
                elements = 1
                for length in part.get_shape():
                    elements *= length
                totals[part.get_dtype()] = totals.get(part.get_dtype(), 0) + elements
    except SafetensorError as error:
        raise ModelError(f"{path} is damaged: {_line(error)}") from error
    return max(totals, key=lambda kind: totals[kind], default="")


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# ---------------------------------------------------------------------------------------------------------- memory


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes per device in training, without activations."""

    weights: int
    gathered: int  # layers that are gathered for computation, and weights outside the layers
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gathered + self.gradients + self.optimizer


STORED, COMPUTED = 4, 2  # bytes: float32 master weights, bfloat16 forward and backward
MOMENTS = 2  # AdamW keeps two numbers per weight, in the dtype of the stored weight
# Bytes per weight: 4 bits, an 8-bit scale per block of 64 weights, a float per 256 scales.
FOUR_BIT = 0.5 + 1 / 64 + 4 / (64 * 256)


def training_memory(anatomy: Anatomy, devices: int, lora_rank: int = 0, four_bit: bool = False) -> Memory:
    """Memory per device with `backend: fsdp2`, AdamW, `model.dtype: float32` and `compute_dtype: bfloat16`.

    The model is sharded over `devices`. `lora_rank`: train an adapter on every linear layer and freeze the weights.
    `four_bit`: keep the frozen linear layers in 4 bits (nf4, double quantisation), all of them on each device.
    """
    learnt = anatomy.lora_parameters(lora_rank) if lora_rank else anatomy.parameters
    frozen = anatomy.parameters if lora_rank else 0
    if four_bit:
        return _beside_four_bits(anatomy, devices, learnt)
    if devices == 1:  # a bfloat16 copy of the master weights, and gradients of both
        return Memory(
            weights=(STORED + COMPUTED) * learnt + COMPUTED * frozen,
            gathered=0,
            gradients=(STORED + COMPUTED) * learnt,
            optimizer=MOMENTS * STORED * learnt,
        )
    share = -(-learnt // devices)
    return Memory(
        weights=STORED * share + COMPUTED * -(-frozen // devices),
        gathered=COMPUTED * (2 * anatomy.largest_layer + anatomy.embedding),
        gradients=STORED * share,
        optimizer=MOMENTS * STORED * share,
    )


def _beside_four_bits(anatomy: Anatomy, devices: int, learnt: int) -> Memory:
    bits = round(FOUR_BIT * anatomy.linear_parameters)
    others = anatomy.parameters - anatomy.linear_parameters
    matrix = max((inputs * outputs for _, _, inputs, outputs in anatomy.linear), default=0)  # dequantised one at a time
    share, copy = -(-learnt // devices), COMPUTED if devices == 1 else 0
    return Memory(
        weights=bits + (STORED + copy) * share + COMPUTED * -(-others // devices),
        gathered=COMPUTED * (matrix + (anatomy.embedding if devices > 1 else 0)),
        gradients=(STORED + copy) * share,
        optimizer=MOMENTS * STORED * share,
    )


def activation_bytes_per_token(anatomy: Anatomy, checkpointing: bool) -> int:
    """Estimate the bytes that one token of a micro-batch keeps for the backward pass, in bfloat16.

    Per layer: two norms and their outputs (12 bytes per hidden unit, because their inputs are kept in float32),
    queries, keys and values before and after rotation, attention's output, and gate, up, activation and product of the
    MLP. With checkpointing: the input of each layer, and one whole layer at a time.
    """
    plain = 12 * anatomy.hidden + 8 * anatomy.mlp
    attentions = [_attention_bytes(one) for one in anatomy.attention]
    if checkpointing:
        return 2 * anatomy.hidden * anatomy.layers + plain + max(attentions, default=0)
    return plain * anatomy.layers + sum(attentions)


def _attention_bytes(one: AttentionShape) -> int:
    pairs = one.kv_heads * (one.key_size + one.value_size) * one.cached  # keys of another layer are kept there
    return 8 * one.heads * one.key_size + 6 * pairs + 2 * one.heads * one.value_size


def logits_bytes(anatomy: Anatomy, chunk_tokens: int) -> int:
    """Bytes of one chunk of logits: in bfloat16, in float32, and their gradient. Only one chunk exists at a time."""
    return chunk_tokens * anatomy.vocabulary * (2 + 4 + 4)
