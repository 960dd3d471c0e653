"""Sizes of a model from its config and file headers, without reading any weights.

config.json --transformers, meta device--> empty model --> counts, shapes, layers, what a backward keeps for a token
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig

from hone.models.adaptable import default_targets
from hone.models.attention.indexed import indexers
from hone.models.attention.shapes import AttentionShape, attention_shapes, kept_per_token
from hone.models.attention.stateful import state_layers, unknown_states
from hone.models.attention.support import obstacle
from hone.models.dropout import set_dropout
from hone.models.errors import ModelError
from hone.models.files.left_out import WHOLE, left_out, read_index, require_all_files
from hone.models.loading import check_model_source, folder_of
from hone.models.quantised import method_of
from hone.models.settings import ModelConfig
from hone.models.value_head import VALUE_HEAD_FILE, is_classifier
from hone.models.vision.model import auto_class

_SHARED_SIZES = ("qk_nope_head_dim", "qk_rope_head_dim")  # latent attention (DeepSeek): a key is both, concatenated
_KINDS = ("layer_types", "layers_block_type")  # names of the list of kinds of layers
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
    left_out: dict[str, int]  # parts that the model's class does not read, with their numbers of weights

    def unread(self) -> str:
        """A sentence about `left_out`; empty if everything is read."""
        parts = ", ".join(f"{name} ({count} weight{'s' * (count != 1)})" for name, count in self.left_out.items())
        return f"{parts}: not trained, not served, and not in an export" if parts else ""


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
    kept: tuple[int, int]  # bytes that a backward keeps for a token, in bfloat16 and float32; 0: unknown
    expert_layers: int
    expert_width: int  # inner width of one routed expert
    largest_weight: int  # parameters of the largest tensor
    files: Files

    def lora_parameters(self, rank: int) -> int:
        """Parameters of an adapter on every linear layer but the head."""
        return sum(count * rank * (inputs + outputs) for _, count, inputs, outputs in self.linear)

    @property
    def routed_parameters(self) -> int:
        """Parameters of all routed experts."""
        return min(
            self.expert_layers * self.experts * 3 * self.hidden * self.expert_width, self.parameters - self.embedding
        )

    @property
    def linear_parameters(self) -> int:
        """Parameters of every linear layer but the head, without biases."""
        return sum(count * inputs * outputs for _, count, inputs, outputs in self.linear)

    def kv_bytes_per_token(self, width: int = 2) -> int:
        """Size of the built-in engine's KV cache per token; it caches every layer, windowed or not."""
        pairs = sum(one.kv_heads * (one.key_size + one.value_size) for one in self.attention if one.cached)
        return (pairs + self.index_size) * width


def examine(model: ModelConfig) -> Anatomy:
    """Describe a model. Raises ModelError for a model that hone would not load.

    It has one to two seconds of work for a model of many layers.
    """
    stored = check_model_source(model)
    folder = folder_of(model, weights=False)
    config: Any = None
    reason = ""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
        reason = obstacle(config)  # as a run asks; building may change the config
        with torch.device("meta"):
            empty = auto_class(config.model_type).from_config(config, trust_remote_code=model.trust_remote_code)
        set_dropout(empty, model.used.dropout)  # as a run does: a rate of its config would keep masks
    except (ValueError, KeyError, ImportError, AttributeError, TypeError) as error:
        found = f"cannot be trained: {reason}" if reason else f"cannot be built by transformers: {_line(error)}"
        raise ModelError(f"model.path {model.path!r} {found}") from error
    empty.tie_weights()
    reason = reason or obstacle(config, type(empty)) or unknown_states(empty)
    if reason and getattr(empty.config.get_text_config(), "num_hidden_layers", None) is None:
        raise ModelError(f"model.path {model.path!r} cannot be trained: {reason}")
    if Path(model.path or "").is_dir() and any(folder.glob("*.safetensors")):  # else the weights are still on a hub
        require_all_files(folder)
    return _measured(empty, reason, _files(folder, stored, empty))


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
    attention = () if reason else attention_shapes(model)
    kept = tuple(kept_per_token(model, dtype) if attention else 0 for dtype in (torch.bfloat16, torch.float32))
    return Anatomy(
        family=model.config.model_type,
        architecture=type(model).__name__,
        parameters=sum(sizes.values()),
        active=round(sum(sizes.values()) - idle),
        embedding=sum(embedding.values()),
        largest_layer=max(_layer_sizes(sizes).values(), default=0),
        layers=_layers(text),
        hidden=text.hidden_size,
        attention=attention or _from_config(text),
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
        kept=(kept[0], kept[1]),
        expert_layers=sum(name.endswith(".experts") for name, _ in model.named_modules()) if experts else 0,
        expert_width=int(getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", 0) or 0)
        if experts
        else 0,
        largest_weight=max(sizes.values()),
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
    """Shapes of attention where the model cannot be run without weights; all layers with attention are alike then."""
    heads = getattr(text, "num_attention_heads", None) or 0
    parts = [int(getattr(text, name, None) or 0) for name in _SHARED_SIZES]
    size = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else 0)
    key, value = (sum(parts), int(text.v_head_dim)) if all(parts) else (size, size)
    one = AttentionShape(heads, getattr(text, "num_key_value_heads", None) or heads, key, value, cached=True)
    kinds = next((found for name in _KINDS if (found := getattr(text, name, None))), None)
    layers = text.num_hidden_layers if kinds is None else sum(_attends(str(kind)) for kind in kinds)
    return (one,) * (layers if heads else 0)


def _attends(kind: str) -> bool:
    """Return whether a layer of this kind caches keys and values: one with linear attention has a state instead."""
    return "hybrid" in kind or ("attention" in kind and "linear" not in kind)


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


def _files(folder: Path, stored: dict[str, Any], empty: Any) -> Files:
    """Describe the weight files from names and headers; for a model that is still on a hub, from its index."""
    whole = folder / WHOLE
    paths = [path for path in sorted(folder.glob("*.safetensors")) if path.name != VALUE_HEAD_FILE]
    paths = [whole] if whole in paths else paths
    count, size = len(paths), sum(path.stat().st_size for path in paths)
    if (index := read_index(folder)) is not None:
        count, size = len(set(index[0].values())), index[1] or size
    dtype = str(getattr(empty.config, "dtype", None) or "").removeprefix("torch.")
    if paths:
        dtype = _dtype_in(paths[0]) or dtype
    head = "language model"
    if is_classifier(stored):
        head = "sequence classifier"
    elif (folder / VALUE_HEAD_FILE).is_file():
        head = "value head"
    return Files(count, size, dtype, method_of(stored), head, left_out(folder, empty))


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
