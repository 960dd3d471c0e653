"""Facts of a model for the built-in engine: dtype, configuration, end-of-sequence ids, longest sequence."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from hone.models.rotary import changing_rope, longest_position, rotary_context
from hone.rollout.settings import BuiltinSettings


def storage_dtype(name: str, model: PreTrainedModel | PreTrainedConfig) -> torch.dtype:
    if name != "auto":
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype)
        return dtype
    return model.dtype if isinstance(model.dtype, torch.dtype) else torch.float32


def run_config(model: PreTrainedModel | PreTrainedConfig) -> Any:
    """The model's config, with the `model.use.context` that its rotary positions are laid out for as `run_context`."""
    if not isinstance(model, PreTrainedModel):
        return model
    config = copy.deepcopy(model.config)
    config.run_context = rotary_context(model)
    return config


def eos_ids(model: PreTrainedModel | PreTrainedConfig, tokenizer: Any) -> tuple[int, ...]:
    """The generation config's end-of-sequence ids; if it has none, the tokenizer's."""
    if isinstance(model, PreTrainedModel):
        generation = model.generation_config
    else:
        generation = GenerationConfig.from_model_config(model)
    found = generation.eos_token_id if generation is not None else None
    if found is None:
        found = getattr(tokenizer, "eos_token_id", None)
    if found is None:
        return ()
    return (found,) if isinstance(found, int) else tuple(found)


def longest_sequence(settings: BuiltinSettings, config: PreTrainedConfig) -> int:
    """Longest sequence that is served. Raises ValueError if the settings promise more than there is."""
    context = longest_position(config, getattr(config, "run_context", None)) or settings.kv_cache_tokens
    longest = settings.max_sequence_tokens or min(context, settings.kv_cache_tokens)
    if longest > context:
        more = "; set model.use.context to the longest sequence of the run" if changing_rope(config) else ""
        raise ValueError(f"max_sequence_tokens={longest} is beyond the model's context of {context} tokens{more}")
    if longest > settings.kv_cache_tokens:
        raise ValueError(f"max_sequence_tokens={longest} is more than kv_cache_tokens={settings.kv_cache_tokens}")
    return longest


__all__ = ["eos_ids", "longest_sequence", "run_config", "storage_dtype"]
