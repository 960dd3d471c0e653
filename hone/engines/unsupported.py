"""Errors for settings that a backend does not have."""

from __future__ import annotations

from collections.abc import Mapping

from hone.config import Config
from hone.engines.base import EngineSpec


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
