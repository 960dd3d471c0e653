"""Errors for settings that a backend does not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from hone.config import Config
from hone.engines.base import EngineSpec
from hone.models.attention.support import carries_state
from hone.models.building import build_config
from hone.models.errors import ModelError
from hone.models.loading import check_model_source, folder_of
from hone.models.settings import ModelConfig


def refuse(backend: str, asked: Mapping[str, bool]) -> None:
    """Raise ValueError naming the first key that is set; `asked`: keys that a backend lacks, and if set."""
    for key, is_asked in asked.items():
        if is_asked:
            raise ValueError(f"backend {backend} does not have {key}; remove it, or use backend fsdp2")


def refuse_expert_ranks(parallel: Config | None, reason: str) -> None:
    """Raise ValueError if ranks should divide the experts of a mixture; `reason`: why the backend cannot."""
    ranks = getattr(parallel, "expert", 1)
    if parallel is not None and ranks > 1:
        raise ValueError(
            f"{parallel.key_of('expert')} = {ranks}: {reason}; leave it at 1 (experts are then sharded like other "
            "weights), or use backend fsdp2"
        )


def refuse_unsupported(backend: str, spec: EngineSpec) -> None:
    """Refuse what engines around other packages' models leave to `fsdp2`: adapters, losses of experts, images."""
    engine, used = spec.engine, spec.model.used
    asked = {
        engine.key_of("lora"): engine.lora is not None,
        engine.key_of("moe"): engine.moe is not None,
        used.key_of("vision"): used.vision is not None,
    }
    refuse(backend, asked)


def refuse_unproven_layers(backend: str, model: ModelConfig) -> None:
    """Raise ModelError, before weights are read, for layers that no test compares with `fsdp2`.

    These are layers with a state, sparse attention with an indexer, and layers of different kinds other than windows,
    under another package's sharding.
    """
    if model.build is not None:
        config: Any = build_config(model.build)
    else:
        check_model_source(model)
        config = AutoConfig.from_pretrained(folder_of(model, weights=False), trust_remote_code=model.trust_remote_code)
    cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    text = config.get_text_config()
    kinds = {
        "layers that carry a state from token to token": carries_state(config) or getattr(cls, "_is_stateful", False),
        "sparse attention with an indexer": getattr(text, "index_topk", None),
        "layers that read the keys of earlier ones": getattr(text, "num_kv_shared_layers", None),
        "layers of different shapes": getattr(text, "is_heterogeneous", False),
        "attention in chunks": "chunked_attention" in (getattr(text, "layer_types", None) or ()),
    }
    found = next((kind for kind, has in kinds.items() if has), "")
    if found:
        name = model.path or "the model of model.build"
        raise ModelError(
            f"backend {backend} does not train {name}, whose model_type is {config.model_type!r}: it has {found}; use "
            "backend fsdp2"
        )
