"""Platforms: the kind of device that this process runs on.

Read `base`: the interface (`PlatformBase`), the decorator that registers a new platform (`PlatformRegistry`) and the
choice of one (`current_platform`). `cpu`, `cuda` (NVIDIA) and `rocm` (AMD) implement it, and plug-ins. `facts` is
a platform's table of facts with their sources, `sharing` what the weight sync needs, `host_memory` freed host memory,
`layout` the ranks of a model by dimension.
"""

from __future__ import annotations

from hone.registry import Registry

PLATFORMS = Registry(
    "platform",
    {
        "cuda": "hone.platforms.cuda:CudaPlatform",
        "rocm": "hone.platforms.rocm:RocmPlatform",
        "cpu": "hone.platforms.cpu:CpuPlatform",
    },
)
