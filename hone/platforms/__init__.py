"""Platforms: what kind of device this process runs on, and how it is spoken to.

`hone.platforms.base` has the contract (`PlatformBase`), the decorator that registers a new one (`PlatformRegistry`)
and the choice (`current_platform`).
"""

from __future__ import annotations

from hone.registry import Registry

PLATFORMS = Registry(
    "platform",
    {
        "cuda": "hone.platforms.cuda:CudaPlatform",
        "rocm": "hone.platforms.cuda:RocmPlatform",
        "cpu": "hone.platforms.cpu:CpuPlatform",
    },
)
