"""AMD GPUs through ROCm. torch calls them `cuda`, and RCCL `nccl`; variables and limits are ROCm's own.

Written from the sources that `RocmPlatform.sources` names. No part of hone ever ran on an AMD GPU.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from hone.platforms.cuda import GpuPlatform

SLEEP_SINCE = 7  # major version of ROCm with which vLLM's sleep mode gives memory back
LARGEST_CAPTURE = 64  # tokens of the largest captured graph on several machines


class RocmPlatform(GpuPlatform):
    """AMD Instinct GPUs: gfx942 (MI300X, MI325X) and gfx950 (MI350X, MI355X)."""

    name = "rocm"
    vendor = "amd"
    architectures = ("gfx942", "gfx950")
    visible_devices_variable = "HIP_VISIBLE_DEVICES"
    ray_override_variables = (
        "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES",
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
        "RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES",
    )
    allocator_variable = "PYTORCH_HIP_ALLOC_CONF"
    container = "--device=/dev/kfd --device=/dev/dri --group-add video --security-opt seccomp=unconfined --ipc=host"
    never_run = "no part of hone ever ran on an AMD GPU"
    sources = {  # noqa: RUF012  a ClassVar of the base class
        **dict.fromkeys(("device", "vendor", "dtypes", "fused_optimizers"), "torch's notes on HIP semantics"),
        "grouped_products": "torch 2.13 documents grouped_mm for NVIDIA GPUs alone",
        "architectures": "vllm 0.32, vllm/platforms/rocm.py: gfx942 and gfx950 are its MI3xx",
        "attention_kernels": "torch.nn.attention of torch 2.13: varlen (AOTriton), flex_attention (Triton)",
        "compiles_triton": "Triton's README: ROCm 6.2 and newer",
        "records_graphs": "torch's notes on HIP semantics: torch.cuda.CUDAGraph is a HIP graph; never run with hone",
        "allocator_variable": "torch's notes on HIP semantics, `Memory management`",
        **dict.fromkeys(("collectives_backend", "supports_broadcast"), "torch's notes on HIP semantics: nccl is RCCL"),
        "supports_ipc": "torch.UntypedStorage._share_cuda_: HIP's IPC handles; reports of failures: verl on ROCm",
        "visible_devices_variable": "ROCm documentation, GPU isolation; vllm 0.32, vllm/platforms/rocm.py",
        "ray_resource": "ray 2.60, ray/_private/accelerators/amd_gpu.py",
        "ray_override_variables": "vllm 0.32, vllm/platforms/rocm.py; ray 2.60 reads the first",
        "profiler_activity": "torch.profiler.ProfilerActivity; roctracer under the name CUDA",
        "container": "ROCm documentation, running containers; vLLM's image for ROCm",
    }

    def why_unavailable(self) -> str:
        if torch.version.hip is None:
            return f"torch {torch.__version__} is built without ROCm"
        if not torch.cuda.is_available():
            return f"torch {torch.__version__} finds no usable AMD GPU (driver missing, or all hidden)"
        return ""

    def visible_devices(self, indices: Sequence[int]) -> dict[str, str]:
        """Both variables, because vLLM refuses to start if CUDA_VISIBLE_DEVICES says something else than HIP's."""
        found = super().visible_devices(indices)
        return {**found, "CUDA_VISIBLE_DEVICES": found[self.visible_devices_variable]}

    def rollout_options(self, backend: str, nodes: int) -> dict[str, Any]:
        """vLLM: no sleep mode before ROCm 7, and on several machines graphs of at most 64 tokens."""
        if backend != "vllm":
            return {}
        asleep = {"enable_sleep_mode": False} if self.why_no_sleep(backend) else {}
        # Captures of larger graphs hang on several machines: verl's tutorial for AMD names 1 to 64.
        return {**asleep, **({"max_cudagraph_capture_size": LARGEST_CAPTURE} if nodes > 1 else {})}

    def why_no_sleep(self, backend: str) -> str:
        """vLLM frees memory by HIP's virtual memory functions (vllm-project/vllm#12695), complete since ROCm 7."""
        if backend != "vllm" or rocm_major(torch.version.hip) >= SLEEP_SINCE:
            return ""
        return f"vLLM's sleep mode needs ROCm {SLEEP_SINCE} or newer, and this torch is built for {torch.version.hip}"


def rocm_major(version: str | None) -> int:
    """The major version of ROCm in `torch.version.hip` ("7.1.25424" -> 7); 0 if it has none."""
    found = re.match(r"\d+", version or "")
    return int(found[0]) if found else 0
