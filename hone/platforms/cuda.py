"""GPUs that torch calls `cuda`: NVIDIA, and AMD through ROCm (`torch.version.hip` is then set)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hone.platforms.base import PlatformBase

NATIVE_BFLOAT16 = (8, 0)  # compute capability: Ampere


def lacking_bfloat16(capability: tuple[int, int]) -> str:
    """What an NVIDIA GPU of this compute capability lacks to multiply bfloat16; empty if it can."""
    if capability >= NATIVE_BFLOAT16:
        return ""
    return f"this GPU has compute capability {capability[0]}.{capability[1]}, and bfloat16 needs 8.0 (Ampere)"


class CudaPlatform(PlatformBase):
    """NVIDIA GPUs."""

    name = "cuda"
    device = "cuda"
    vendor = "nvidia"
    collectives_backend = "nccl"
    visible_devices_variable = "CUDA_VISIBLE_DEVICES"
    ray_resource = "GPU"
    supports_ipc = True

    def why_unavailable(self) -> str:
        if torch.version.hip is not None:
            return f"torch {torch.__version__} is built for ROCm {torch.version.hip}"
        if torch.version.cuda is None:
            return f"torch {torch.__version__} is built without CUDA"
        if not torch.cuda.is_available():
            return f"torch {torch.__version__} finds no usable NVIDIA GPU (driver missing or too old, or all hidden)"
        return ""

    def why_bfloat16_is_slow(self) -> str:
        return lacking_bfloat16(torch.cuda.get_device_capability())

    def rollout_environment(self, indices: Sequence[int]) -> dict[str, str]:
        """Show the given devices, in PCI bus order, so that an index means the same GPU in every process."""
        return {**self.visible_devices(indices), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


class RocmPlatform(PlatformBase):
    """AMD GPUs: torch's `cuda` functions, RCCL (torch calls it nccl), another variable for visible devices."""

    name = "rocm"
    device = "cuda"
    vendor = "amd"
    collectives_backend = "nccl"
    visible_devices_variable = "HIP_VISIBLE_DEVICES"
    ray_resource = "GPU"
    supports_ipc = True

    def why_unavailable(self) -> str:
        if torch.version.hip is None:
            return f"torch {torch.__version__} is built without ROCm"
        if not torch.cuda.is_available():
            return f"torch {torch.__version__} finds no usable AMD GPU (driver missing, or all hidden)"
        return ""
