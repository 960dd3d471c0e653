"""Patches on vLLM 0.32, each with what it is for and when it can go."""

from __future__ import annotations

import torch


def pack_cpu_experts_again(model: torch.nn.Module) -> None:
    """Let the experts of a model on a CPU be packed anew when the weights of an update are whole.

    vLLM packs them for its CPU kernel only when the kernel is made, and keeps the kernel over updates (for the graphs
    of accelerators, which a CPU has none of); what comes later stays in the order of files, and is read as packed. This
    can go when `UnquantizedFusedMoEMethod._setup_kernel` packs the weights of an update too.
    Upstream: https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/fused_moe/unquantized_fused_moe_method.py
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None and _on_cpu(module):
            method.moe_kernel = None  # type: ignore[union-attr]


def _on_cpu(module: torch.nn.Module) -> bool:
    return all(weight.device.type in ("cpu", "meta") for weight in module.parameters())
