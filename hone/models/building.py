"""Build a model from a transformers architecture with given sizes and random weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hone.models.attention.packed import PACKED
from hone.models.errors import ModelError
from hone.models.settings import BuildConfig
from hone.models.tokenizer import SPECIAL_TOKENS
from hone.models.vision.building import BUILT, vision_language_config
from hone.models.vision.model import attention_names, auto_class
from hone.registry import unknown

# Our name -> names in transformers' configs; the first one that a config has is set.
_FIELDS: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd"),
    "layers": ("num_hidden_layers", "n_layer"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "head_size": ("head_dim",),
    "mlp_size": ("intermediate_size", "n_inner"),
    "max_positions": ("max_position_embeddings", "n_positions"),
    "tie_embeddings": ("tie_word_embeddings",),
}


def build_config(build: BuildConfig) -> PreTrainedConfig:
    """The transformers config of the model. Raises ModelError for an unknown architecture or option."""
    if build.vision is not None or build.architecture in BUILT:
        return vision_language_config(build)
    architectures = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING]
    if build.architecture not in architectures:
        raise ModelError("model.build.architecture: " + unknown("architecture", build.architecture, architectures))
    cls = CONFIG_MAPPING[build.architecture]
    fields = {field.name for field in dataclasses.fields(cls)} | set(cls.attribute_map)
    values = _sizes(build, fields)
    for option in build.options:
        if option not in fields:
            raise ModelError("model.build.options: " + unknown(f"setting of {cls.__name__}", option, sorted(fields)))
    vocabulary = len(SPECIAL_TOKENS) + len(build.characters)
    values |= {"vocab_size": vocabulary, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config: PreTrainedConfig = cls(**{**values, **build.options})
    return config


def _sizes(build: BuildConfig, fields: set[str]) -> dict[str, Any]:
    sizes = {
        "hidden_size": build.hidden_size,
        "layers": build.layers,
        "heads": build.heads,
        "kv_heads": build.kv_heads or build.heads,
        "head_size": build.head_size or build.hidden_size // build.heads,
        "mlp_size": build.mlp_size,
        "max_positions": build.max_positions,
        "tie_embeddings": build.tie_embeddings,
    }
    values: dict[str, Any] = {}
    for name, value in sizes.items():
        theirs = next((word for word in _FIELDS[name] if word in fields), None)
        if theirs is not None:
            values[theirs] = value
        elif name in build.model_fields_set:
            raise ModelError(
                f"model.build.{name}={getattr(build, name)} does not exist in architecture {build.architecture!r}; "
                "remove it, or choose another architecture"
            )
    return values


def build_model(build: BuildConfig, dtype: torch.dtype) -> PreTrainedModel:
    """A model whose random weights depend only on sizes and seed. Does not use the caller's random generators."""
    config = build_config(build)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(build.seed)
        kind = config.model_type
        model: PreTrainedModel = auto_class(kind).from_config(
            config, dtype=dtype, attn_implementation=attention_names(kind, PACKED)
        )
    return model
