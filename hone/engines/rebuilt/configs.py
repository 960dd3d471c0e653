"""Reading of a config.json for engines with modules of their own, and the models that they refuse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hone.models.errors import ModelError
from hone.models.rotary import CHANGING


def require_computed(config: Any, name: str, backend: str, wanted: Mapping[str, Any]) -> None:
    """Raise ModelError if a config.json has another value than the one that the engine computes."""
    for key, value in wanted.items():
        found = getattr(config, key, None)
        if found is not None and found != value:
            raise ModelError(
                f"{name} has {key}={found!r} in its config.json, and the {backend} engine computes {value!r} only; "
                "use backend fsdp2"
            )


def require_family(config: Any, name: str, backend: str, families: tuple[str, ...]) -> None:
    """Raise ModelError unless the engine builds models of this type."""
    kind = config.model_type
    if kind not in families:
        raise ModelError(
            f"{name} is a {kind!r} model, and the {backend} engine builds {', '.join(families)}; use backend fsdp2"
        )


DENSE: Mapping[str, Any] = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
"""What these engines compute, by key of a dense decoder's config.json."""


WINDOWED = frozenset({"mistral", "mixtral", "qwen3_moe"})
"""Model types whose `sliding_window` holds for every layer. Others have `layer_types`, or ignore the key (Llama)."""


def fixed_rotary(body: Any, name: str, backend: str) -> tuple[Tensor, float]:
    """Frequencies [d / 2] in float32 and the scale of queries and of keys, of a body on the meta device.

    Raises ModelError for rotary positions that depend on the length of a batch.
    """
    rotary = type(body.rotary_emb)(body.config)
    if rotary.rope_type in CHANGING:
        raise ModelError(
            f"{name} has rotary positions of type {rotary.rope_type!r}, which the {backend} engine does not have; "
            "use backend fsdp2"
        )
    return rotary.inv_freq.float(), float(rotary.attention_scaling)


def windows_of(config: Any) -> tuple[int | None, ...]:
    """The sliding window of each layer's attention; None: a token sees all before it."""
    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    if config.model_type in WINDOWED:
        kinds = ["sliding_attention"] * config.num_hidden_layers
    return tuple(config.sliding_window if kind == "sliding_attention" else None for kind in kinds)


def padding_token(config: Any) -> int | None:
    """The token whose embedding gets no gradient; torch's embedding counts a negative one from the end."""
    token = config.pad_token_id
    return None if token is None else int(token) % int(config.vocab_size)


def head_size(config: Any) -> int:
    """Numbers of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
