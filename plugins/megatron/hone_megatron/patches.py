"""Patches on megatron-core 0.16 for every device. What only a CPU needs is in `cpu_patches`."""

from __future__ import annotations

from megatron.core.transformer.moe import moe_utils


def router_without_transformer_engine() -> None:
    """A router calls a kernel of Transformer Engine, whose name is not even defined if that package is missing.

    None makes the router multiply in torch.
    Upstream: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/transformer/moe/moe_utils.py
    """
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)


def patch() -> None:
    """Apply every patch; a second call changes nothing."""
    router_without_transformer_engine()
