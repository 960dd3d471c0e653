"""Reasons why hone cannot train a model exactly, as far as its configuration and its class tell.

Both the loading of a model and `hone doctor --model` ask here, so they give the same answer. What no configuration
tells, the checks at the start of an engine find (`hone.engines.probe`).
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", "indexed_attention")
STATES = ("conv", "hybrid", "hybrid_sliding", "linear_attention")
"""Kinds of layers that carry a state from token to token. The checks at the start of an engine judge them."""

_WITHOUT_MIXING = ("mlp", "moe")
_KNOWN = (*ATTENTION, *STATES, *_WITHOUT_MIXING)
_KINDS = {
    "minimax_m3_sparse": "its sparse attention (an indexer chooses blocks of keys) is not supported",
}
_COMPRESSED = "its attention reads keys that are compressed from several tokens"
_TYPES = {
    "deepseek_v4": _COMPRESSED,
    "doge": "its attention adds a learnt mask to the scores, which packed attention does not compute",
    "gemma4_assistant": "it drafts tokens for a Gemma 4 model and is no language model by itself",
    "gemma4_unified_assistant": "it drafts tokens for a Gemma 4 model and is no language model by itself",
    "inkling_text": "its attention adds a learnt position bias to the scores, which packed attention does not compute",
    "mllama": "its layers attend to images by cross-attention",
    "emu3": "transformers loads its language model as a type that no config.json may name (emu3_text_model)",
    "modernbert-decoder": "its head has layers besides the output matrix",
    "qwen4_exp": _COMPRESSED,
    "qwen4_exp_text": _COMPRESSED,
    "xmod": "its layers need the language of each text",
}
_PACKED_WITHOUT_SAYING = ("stablelm", "whisper")  # their classes do not declare it, and the checks at start-up pass
_CAUSAL_ANYWAY = ("gpt_neox",)  # has `is_decoder`, and does not read it


def obstacle(config: PreTrainedConfig, cls: type[PreTrainedModel] | None = None) -> str:
    """Return why hone cannot train a model of this configuration exactly; empty if nothing is known against it.

    `cls`: its class; None: transformers' own for causal language models. A model with recurrent layers passes here.
    """
    kind = config.model_type
    if kind in _TYPES:
        return _TYPES[kind]
    if cls is None:
        found: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        cls = found[0] if isinstance(found, tuple) else found
    declared: Any = cls
    replaceable = cls is None or declared._is_stateful or declared._supports_attention_backend
    if not replaceable and kind not in _PACKED_WITHOUT_SAYING:
        return "its attention is its own, which transformers cannot replace by packed attention"
    if getattr(config, "is_decoder", True) is False and kind not in _CAUSAL_ANYWAY:
        return "it is an encoder whose attention looks ahead (is_decoder is false in config.json)"
    return next((_of_kind(one) for one in _layer_kinds(config) if one not in _KNOWN), "")


def carries_state(config: PreTrainedConfig) -> bool:
    """Return whether a configuration names layers that carry a state from token to token."""
    return not set(STATES).isdisjoint(_layer_kinds(config))


def _layer_kinds(config: PreTrainedConfig) -> list[str]:
    return list(getattr(config.get_text_config(), "layer_types", None) or [])


def _of_kind(kind: str) -> str:
    return _KINDS.get(kind, f"hone does not know its layers of kind {kind!r}")
