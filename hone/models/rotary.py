"""Rotary positions whose frequencies are chosen once for a run, so that a token's numbers do not depend on its batch.

transformers chooses the frequencies of two types in each forward, by the largest position in it: `longrope` takes its
short or its long factors, `dynamic` scales its base. A short sequence then changes when a long one is packed with it,
or when the row is cut elsewhere. hone chooses by `model.use.context`, the longest sequence of the run:

    longrope   long factors if context > original_max_position_embeddings, else short ones; vLLM does the same with its
               `max_model_len`, and takes the short ones by default, too
    dynamic    the base for sequences of `context` tokens; unscaled up to max_position_embeddings

A longer sequence than that is an error. All other types have one set of frequencies.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hone.models.attention.packed import longest_sequence
from hone.models.errors import ModelError

CHANGING = ("dynamic", "longrope")
FIXED = ("default", "linear", "llama3", "mrope", "proportional", "yarn")


def changing_rope(config: Any) -> tuple[str, int] | None:
    """The type of a model's rotary positions and their length without scaling, if transformers would change them."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    for one in (rope, *(inner for inner in rope.values() if isinstance(inner, dict))):
        if one.get("rope_type") == "longrope":
            return "longrope", int(one["original_max_position_embeddings"])
        if one.get("rope_type") == "dynamic":
            return "dynamic", int(text.max_position_embeddings)
    return None


def longest_position(config: Any, context: int | None) -> int | None:
    """The longest sequence that a model takes, in tokens; None if its config has no limit."""
    changing = changing_rope(config)
    if changing is not None:
        return context or changing[1]
    limit: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit


def fix_rotary(model: nn.Module, context: int | None, name: str) -> None:
    """Give every rotary embedding of a model the frequencies for sequences of `context` tokens, for good.

    Raises ModelError for a type that is not known here, and for a `context` that nothing would use.
    """
    found = False
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            kinds = {None: kinds}
        for layer, kind in kinds.items() if isinstance(kinds, dict) and hasattr(module, "config") else ():
            if kind in CHANGING:
                _fix(module, layer, kind, context, name)
                found = True
            elif kind in ROPE_INIT_FUNCTIONS and kind not in FIXED:
                raise ModelError(
                    f"{name}: rope_type {kind!r} is not known to keep its frequencies; hone takes "
                    f"{', '.join(sorted((*FIXED, *CHANGING)))}"
                )
    if context is not None and not found:
        raise ModelError(
            f"model.use.context={context} chooses rotary frequencies of the types {' and '.join(CHANGING)}, and "
            f"{name} has neither; remove it"
        )


def _fix(module: Any, layer: str | None, kind: str, context: int | None, name: str) -> None:
    config, prefix = module.config, "" if layer is None else f"{layer}_"
    rope = config.rope_parameters if layer is None else config.rope_parameters[layer]
    plain = rope["original_max_position_embeddings"] if kind == "longrope" else config.max_position_embeddings
    longest = context or plain
    before = getattr(module, f"{prefix}inv_freq")
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, before.device, seq_len=longest, layer_type=layer)
    setattr(module, f"{prefix}inv_freq", nn.Buffer(frequencies, persistent=False))
    setattr(module, f"{prefix}attention_scaling", scaling)
    module.rope_type = "default" if layer is None else {**module.rope_type, layer: "default"}  # not updated any more
    module.rotary_context = longest

    def check(*_: Any) -> None:
        length = longest_sequence()
        if length > longest:
            raise ValueError(
                f"a sequence of {length} tokens, but the rotary positions of {name} ({kind}) are laid out for "
                f"{longest}; set model.use.context to the longest sequence of the run"
            )

    module.register_forward_pre_hook(check)


def rotary_context(model: nn.Module) -> int | None:
    """The `context` that a model's rotary positions were laid out for; None: they have one set of frequencies."""
    return next((module.rotary_context for module in model.modules() if hasattr(module, "rotary_context")), None)  # type: ignore[return-value]
