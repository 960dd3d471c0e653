"""Settings that only the `automodel` engine has: `actor.backend: {name: automodel, parallel: {tensor: 2}}`."""

from __future__ import annotations

from typing import ClassVar, Literal

from hone.config import setting
from hone.engines.fsdp2.settings import ParallelConfig, ShardedSettings


class AutomodelSettings(ShardedSettings):
    """Models of transformers, or Automodel's own, sharded by NeMo Automodel."""

    dimensions: ClassVar[tuple[str, ...]] = ("replicate", "tensor", "sequence")
    name: str = "automodel"
    parallel: ParallelConfig | None = setting(
        None, "how ranks divide the work; null: all ranks shard weights and split batches (FSDP)"
    )
    models: Literal["transformers", "automodel"] = setting(
        "transformers", "whose model classes: transformers' (every family), or Automodel's own (Qwen3)"
    )
