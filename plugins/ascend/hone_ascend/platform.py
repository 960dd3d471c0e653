"""Huawei's Ascend NPUs through the package torch_npu, which gives torch a device type `npu` and collectives by HCCL.

Written from the sources that `AscendPlatform.sources` names. No part of hone ever ran on an NPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hone.platforms.base import PlatformBase

DRIVER = Path("/usr/local/Ascend/driver/version.info")
TOOLKIT = Path("/usr/local/Ascend/ascend-toolkit/latest")
TOOLKIT_VARIABLE = "ASCEND_TOOLKIT_HOME"
IPC_SINCE = (("driver", "25.3.RC1"), ("CANN toolkit", "8.3.RC1"))  # verl/utils/device.py; torch_npu's notes on IPC

Version = tuple[int, int, int, int]


class AscendPlatform(PlatformBase):
    """Atlas A2 and A3 (Ascend 910B, 910C)."""

    name = "ascend"
    device = "npu"
    vendor = "huawei"
    architectures = ("Ascend910B", "Ascend910C")
    collectives_backend = "hccl"
    visible_devices_variable = "ASCEND_RT_VISIBLE_DEVICES"
    ray_resource = "NPU"
    ray_override_variables = ("RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",)
    supports_ipc = True  # from the versions in `IPC_SINCE`; see `why_no_ipc`
    allocator_variable = "PYTORCH_NPU_ALLOC_CONF"
    dtypes = ("float32", "bfloat16", "float16")
    packages = ("torch_npu", "vllm-ascend")
    container = (
        "--device=/dev/davinci0 --device=/dev/davinci_manager --device=/dev/devmm_svm --device=/dev/hisi_hdc "
        "-v /usr/local/dcmi:/usr/local/dcmi -v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi "
        "-v /usr/local/Ascend/driver/lib64/:/usr/local/Ascend/driver/lib64/ "
        "-v /usr/local/Ascend/driver/version.info:/usr/local/Ascend/driver/version.info "
        "-v /etc/ascend_install.info:/etc/ascend_install.info"
    )
    never_run = "no part of hone ever ran on an NPU"
    sources = {  # noqa: RUF012  a ClassVar of the base class
        **dict.fromkeys(("device", "vendor", "dtypes"), "torch_npu's documentation"),
        "architectures": "vllm-ascend's documentation, installation",
        "attention_kernels": "torch_npu has scaled_dot_product_attention, and no kernel for torch's varlen attention",
        "grouped_products": "torch_npu has grouped products of its own, which torch's `grouped_mm` does not reach",
        "fused_optimizers": "torch_npu has fused optimizers of its own, which `fused=True` does not reach",
        "compiles_triton": "triton-ascend is a package of its own, with which hone's kernels were never compiled",
        "records_graphs": "torch_npu has graphs of its own (torch.npu.NPUGraph), for which `record` is not written",
        "allocator_variable": "torch_npu's documentation, environment variables",
        "collectives_backend": "torch_npu: ProcessGroupHCCL",
        "supports_broadcast": "not written: the sync's groups use gloo and host memory",
        "supports_ipc": "torch_npu: UntypedStorage._share_npu_; versions: verl/utils/device.py",
        "visible_devices_variable": "CANN's environment variables; ray 2.60, ray/_private/accelerators/npu.py",
        **dict.fromkeys(("ray_resource", "ray_override_variables"), "ray 2.60, ray/_private/accelerators/npu.py"),
        "profiler_activity": "none: torch_npu has a profiler of its own, so hone's traces hold the CPU's part",
        "container": "vllm-ascend's documentation, installation",
    }

    def why_unavailable(self) -> str:
        if importlib.util.find_spec("torch_npu") is None:
            return "the package torch_npu is not installed"
        try:
            importlib.import_module("torch_npu")
        except (ImportError, OSError, RuntimeError) as error:  # libhccl.so is missing: CANN's variables are not set
            text = " ".join(str(error).split())
            return f"torch_npu cannot be imported ({text}); run `source .../ascend-toolkit/set_env.sh` of CANN first"
        return "" if self._module.is_available() else "torch_npu finds no usable NPU (see npu-smi info)"

    def why_no_ipc(self) -> str:
        """The driver or CANN is older than the versions that can open another process's memory, or unknown."""
        for (part, since), found in zip(IPC_SINCE, (driver_version(), toolkit_version()), strict=True):
            if not found:
                return f"the version of the {part} is unknown, and sharing device memory needs {since} or newer"
            if parsed(found) < parsed(since):
                return f"the {part} has version {found}, and sharing device memory needs {since} or newer"
        return ""

    def device_uuids(self) -> list[str]:
        """The numbers that `npu-smi` gives the devices: the runtime has no UUIDs."""
        shown = [entry for entry in os.environ.get(self.visible_devices_variable, "").split(",") if entry]
        return [f"npu-{number}" for number in shown or range(self.device_count())]

    def share(self, tensor: torch.Tensor) -> list[Any]:
        storage: Any = tensor.untyped_storage()
        return list(storage._share_npu_())

    def open_shared(self, index: int, handle: Sequence[Any]) -> torch.Tensor:
        _, *parts = handle  # the first is the device's index in the process that shares
        opener: Any = torch.UntypedStorage
        storage = opener._new_shared_npu(index, *parts)
        return torch.empty(0, dtype=torch.uint8, device=self.torch_device(index)).set_(storage)

    def rollout_options(self, backend: str, nodes: int) -> dict[str, Any]:
        """SGLang needs an option for the device; vLLM finds it by its plug-in, the package vllm-ascend."""
        return {"device": "npu", "attention_backend": "ascend"} if backend == "sglang" else {}


def driver_version() -> str:
    """The driver's version ("25.3.rc1"), from the file that its installer writes; empty if there is none."""
    return _field(DRIVER, "Version")


def toolkit_version() -> str:
    """CANN's version ("8.3.RC1"), from the file that its installer writes; empty if there is none."""
    home = Path(os.environ.get(TOOLKIT_VARIABLE) or TOOLKIT)
    return _field(home / f"{platform.machine()}-linux" / "ascend_toolkit_install.info", "version")


def parsed(version: str) -> Version:
    """A version to compare: 25.3 and 25.3.0 come after 25.3.RC1, which comes after 25.2."""
    numbers = [int(part) for part in re.split(r"\.?rc\d*", version.lower())[0].split(".") if part.isdigit()]
    candidate = re.search(r"rc(\d+)", version.lower())
    major, minor, patch = [*numbers, 0, 0, 0][:3]
    return major, minor, patch, int(candidate[1]) if candidate else 1 << 30


def _field(path: Path, name: str) -> str:
    """The value of `name=value` in a file; empty without it."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    return next((line.partition("=")[2].strip() for line in lines if line.partition("=")[0].strip() == name), "")
