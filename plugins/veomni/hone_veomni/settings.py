"""Settings that only the `veomni` engine has: `actor.backend: {name: veomni, operators: {rms_norm: liger_kernel}}`."""

from __future__ import annotations

from typing import Literal

from hone.config import Config, setting
from hone.engines.fsdp2.settings import ShardConfig, ShardedSettings


class OperatorsConfig(Config):
    """VeOmni's implementations of a layer's operators; attention is always hone's packed attention."""

    rms_norm: Literal["eager", "liger_kernel", "npu"] = setting("eager", "norms; eager: in plain PyTorch")
    rotary_pos_emb: Literal["eager", "liger_kernel", "npu"] = setting("eager", "rotary position embedding")
    swiglu_mlp: Literal["eager", "liger_kernel"] = setting("eager", "the MLP of a dense layer")
    moe: Literal["eager", "fused_triton", "fused_quack", "fused_npu"] = setting("eager", "the experts of a mixture")


class VeomniParallel(ShardConfig):
    """Division of a model and its batches between ranks; by default both are sharded over all ranks (FSDP)."""

    expert: int = setting(1, "ranks that split the experts: 1, or the engine says why not", ge=1)


class VeomniSettings(ShardedSettings):
    """VeOmni's models and operators, sharded by its FSDP2."""

    name: str = "veomni"
    parallel: VeomniParallel | None = setting(
        None, "how ranks divide the work; null: all ranks shard weights and split batches (FSDP)"
    )
    operators: OperatorsConfig | None = setting(None, "implementations of operators; null: all in plain PyTorch")
