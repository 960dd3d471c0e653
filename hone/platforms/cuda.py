"""NVIDIA GPUs, and what torch does alike for NVIDIA and AMD: it calls both `cuda`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hone.platforms.base import PlatformBase, Recording

ORDER_VARIABLE = "CUDA_DEVICE_ORDER"
ERRORS_VARIABLE, CLEAN_UP_ONLY = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"  # by default, a lost peer ends the process
ALLOCATOR_VARIABLE = "PYTORCH_ALLOC_CONF"  # of both vendors; torch reads it first
NATIVE_BFLOAT16 = (8, 0)  # compute capability: Ampere


def lacking_bfloat16(capability: tuple[int, int]) -> str:
    """Return the reason that an NVIDIA GPU of this compute capability cannot multiply bfloat16; empty if it can."""
    if capability >= NATIVE_BFLOAT16:
        return ""
    return f"this GPU has compute capability {capability[0]}.{capability[1]}, and bfloat16 needs 8.0 (Ampere)"


def is_cpu_build() -> bool:
    """Return whether this torch was built without support for NVIDIA and AMD GPUs."""
    return torch.version.cuda is None and torch.version.hip is None


class GpuPlatform(PlatformBase):
    """Platform of `torch.cuda`, on GPUs of both vendors."""

    device = "cuda"
    collectives_backend = "nccl"  # on AMD, torch's nccl is RCCL
    ray_resource = "GPU"
    supports_ipc = True
    supports_broadcast = True
    attention_kernels = ("varlen", "flex", "sdpa")
    dtypes = ("float32", "bfloat16", "float16", "float64")
    fused_optimizers = True
    compiles_triton = True
    records_graphs = True
    profiler_activity = "CUDA"

    def device_uuids(self) -> list[str]:
        if not torch.cuda.is_available():
            return []
        return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]

    def record(self, work: Callable[[], torch.Tensor], beside: Recording | None = None) -> Recording:
        aside, current = self._recording_stream, torch.cuda.current_stream()
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            work()  # libraries allocate their workspaces of this stream now, outside of the graph
        current.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # A pool whose graphs are all gone cannot be used again (an assertion of torch's allocator).
        memory = torch.cuda.graph_pool_handle() if beside is None else beside.memory
        # thread_local: other threads, which may write a checkpoint, can go on using the device
        with torch.cuda.graph(graph, pool=memory, stream=aside, capture_error_mode="thread_local"):
            result = work()
        return Recording(graph.replay, result, memory)

    @functools.cached_property
    def _recording_stream(self) -> torch.cuda.Stream:
        """One for all recordings: cuBLAS keeps a workspace for each stream, and one made in a graph is of its pool."""
        return torch.cuda.Stream()

    def why_no_ipc(self) -> str:
        """Memory of expandable segments is shared by a descriptor that other processes may often not open."""
        settings = os.environ.get(ALLOCATOR_VARIABLE) or os.environ.get(self.allocator_variable, "")
        if "expandable_segments:true" in settings.lower().replace(" ", ""):
            return "memory of expandable_segments (torch's allocator) cannot be shared between processes everywhere"
        return super().why_no_ipc()

    def share(self, tensor: torch.Tensor) -> list[Any]:
        storage: Any = tensor.untyped_storage()
        return list(storage._share_cuda_())

    def open_shared(self, index: int, handle: Sequence[Any]) -> torch.Tensor:
        _, *parts = handle  # the first is the device's index in the process that shares
        opener: Any = torch.UntypedStorage
        storage = opener._new_shared_cuda(index, *parts)
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def pin(self, memory: torch.Tensor) -> bool:
        if not torch.cuda.is_initialized():  # registering would open a context on the device
            return False
        runtime: Any = torch.cuda.cudart()
        return int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0

    def unpin(self, memory: torch.Tensor) -> None:
        runtime: Any = torch.cuda.cudart()
        runtime.cudaHostUnregister(memory.data_ptr())

    def device_group(self, store: Any, rank: int, world: int, timeout_s: float) -> Any:
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        before = os.environ.get(ERRORS_VARIABLE)
        os.environ[ERRORS_VARIABLE] = CLEAN_UP_ONLY  # the constructor reads it
        try:
            return dist.ProcessGroupNCCL(store, rank, world, options)
        finally:
            os.environ.pop(ERRORS_VARIABLE)
            if before is not None:
                os.environ[ERRORS_VARIABLE] = before


class CudaPlatform(GpuPlatform):
    """NVIDIA GPUs."""

    name = "cuda"
    vendor = "nvidia"
    visible_devices_variable = "CUDA_VISIBLE_DEVICES"
    grouped_products = ("bfloat16",)
    ray_override_variables = ("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",)
    allocator_variable = "PYTORCH_CUDA_ALLOC_CONF"
    determinism = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"  # torch reads it once, and refuses products without it
    container = "--gpus all"
    sources = {  # noqa: RUF012  a ClassVar of the base class
        **dict.fromkeys(("device", "vendor", "dtypes", "fused_optimizers"), "torch.cuda of torch 2.13"),
        "architectures": "every GPU that the installed build of torch has kernels for",
        "attention_kernels": "torch.nn.attention of torch 2.13: varlen (FlashAttention 2), flex_attention (Triton)",
        "grouped_products": "torch.nn.functional.grouped_mm of torch 2.13: compute capability 8.0 and newer",
        "compiles_triton": "Triton's README: compute capability 8.0 and newer",
        "records_graphs": "torch's notes on CUDA semantics, `CUDA Graphs`; run on an H200",
        "allocator_variable": "torch's notes on CUDA semantics, `Memory management`",
        **dict.fromkeys(("collectives_backend", "supports_broadcast"), "torch.distributed: NCCL"),
        "supports_ipc": "torch.UntypedStorage._share_cuda_: CUDA's IPC handles",
        "visible_devices_variable": "CUDA C++ programming guide, environment variables",
        **dict.fromkeys(
            ("ray_resource", "ray_override_variables"), "ray 2.60, ray/_private/accelerators/nvidia_gpu.py"
        ),
        "profiler_activity": "torch.profiler.ProfilerActivity",
        "container": "NVIDIA's container toolkit",
    }

    def why_unavailable(self) -> str:
        # CUDA's own order is by speed: an index would be another GPU here than in a rollout server.
        os.environ.setdefault(ORDER_VARIABLE, "PCI_BUS_ID")
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
        """Show the given devices, in this process's order, so that an index means the same GPU in every process."""
        order = os.environ.get(ORDER_VARIABLE, "PCI_BUS_ID")
        return {**self.visible_devices(indices), ORDER_VARIABLE: order}
