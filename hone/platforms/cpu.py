"""The CPU: always there, one device, gloo for collectives, shared memory instead of device IPC."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from hone import machine
from hone.platforms.base import MemoryFacts, PlatformBase
from hone.platforms.host_memory import give_back

STATM = Path("/proc/self/statm")
CPUINFO = Path("/proc/cpuinfo")
NATIVE_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # flags; the last is ARM's


class CpuPlatform(PlatformBase):
    """One device, index 0, that is the whole machine (or what a container may use of it)."""

    name = "cpu"
    device = "cpu"
    vendor = "generic"
    priority = 0
    collectives_backend = "gloo"
    visible_devices_variable = ""
    ray_resource = "CPU"
    dtypes = ("float32", "bfloat16", "float16", "float64")
    fused_optimizers = True
    grouped_products = ("float32", "bfloat16", "float16")
    sources = {  # noqa: RUF012  a ClassVar of the base class
        **dict.fromkeys(("device", "vendor", "architectures"), "torch runs on any x86-64 or ARM processor"),
        "dtypes": "torch computes in all four; /proc/cpuinfo says whether bfloat16 is native",
        "attention_kernels": "torch's varlen attention has no CPU kernel; hone/models/attention has one of its own",
        "fused_optimizers": "torch.optim: fused AdamW and SGD for CPUs since torch 2.4",
        "grouped_products": "torch.nn.functional.grouped_mm of torch 2.13, run in all three",
        "compiles_triton": "Triton's README: CPUs are under development",
        "records_graphs": "torch records graphs on GPUs only",
        "allocator_variable": "torch has no allocator for CPU memory; glibc's is set by hone/platforms/host_memory.py",
        "collectives_backend": "torch.distributed: gloo",
        "supports_broadcast": "weights are in host memory, which gloo sends",
        "supports_ipc": "weights are in host memory; the sync uses shared memory",
        **dict.fromkeys(("visible_devices_variable", "ray_resource", "ray_override_variables"), "Ray's resource CPU"),
        "profiler_activity": "torch.profiler records the CPU always",
        "container": "none is needed",
    }

    def why_unavailable(self) -> str:
        return ""

    def device_count(self) -> int:
        return 1

    def torch_device(self, index: int = 0) -> torch.device:
        return torch.device("cpu")

    def set_device(self, index: int) -> None:
        if index != 0:
            raise ValueError(f"the CPU is one device with index 0, found {index}")

    def device_name(self, index: int = 0) -> str:
        return f"{_model()}, {machine.cores()} cores"

    def why_bfloat16_is_slow(self) -> str:
        return lacking_bfloat16(_flags())

    def synchronize(self) -> None:
        """Nothing is queued on a CPU."""

    def new_stream(self) -> Any:
        return None

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def memory(self, index: int | None = None) -> MemoryFacts:
        """The machine's memory, or the container's limit; allocated and reserved are this process's resident size."""
        total, free = machine.memory()
        resident = _resident()
        peak = max(resident, _peak_resident())  # the kernel updates its own maximum later than the size
        return MemoryFacts(total=total, free=free, allocated=resident, reserved=resident, peak=peak)

    def empty_cache(self) -> None:
        """torch keeps no cache of CPU memory, but the C library does: glibc keeps most of what a load has freed."""
        give_back()

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def rng_state(self) -> dict[str, torch.Tensor]:
        return {"cpu": torch.get_rng_state().clone()}

    def set_rng_state(self, states: Mapping[str, torch.Tensor]) -> None:
        torch.set_rng_state(states["cpu"])

    def rollout_environment(self, indices: Sequence[int]) -> dict[str, str]:
        """One thread: with more, every parallel region stalls while anything else uses a core."""
        return {"OMP_NUM_THREADS": "1"}


def lacking_bfloat16(flags: Collection[str]) -> str:
    """Return the flag of /proc/cpuinfo that a processor lacks to multiply bfloat16; empty if it can."""
    if NATIVE_BFLOAT16.isdisjoint(flags):
        return "this processor has neither AVX512-BF16 nor AMX, so bfloat16 is multiplied as float32"
    return ""


def _model() -> str:
    return _of_processor("model name") or platform.processor() or platform.machine()


def _flags() -> list[str]:
    return (_of_processor("flags") or _of_processor("Features")).split()  # x86; ARM


def _of_processor(field: str) -> str:
    """Return the name of the first processor in /proc/cpuinfo; empty if there is none."""
    lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines() if CPUINFO.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def _resident() -> int:
    if STATM.is_file():
        return int(STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return _peak_resident()


def _peak_resident() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
