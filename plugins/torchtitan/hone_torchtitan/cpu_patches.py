"""Patches on torchtitan 0.3, which takes a machine without an accelerator for one with CUDA. For a CPU only.

Each patch replaces the name of the device in a module that has imported it.
Upstream: https://github.com/pytorch/torchtitan/blob/v0.3.0/torchtitan/tools/utils.py
"""

from __future__ import annotations

from torchtitan.distributed import parallel_dims


def meshes() -> None:
    """Device meshes are opened on the first accelerator's type, `cuda` where there is none."""
    parallel_dims.device_type = "cpu"


PATCHES = (meshes,)


def patch_for_cpu() -> None:
    """Apply every patch; a second call changes nothing."""
    for patch in PATCHES:
        patch()
