"""A vendor's package for hone: a device that does not exist, and the platform that makes hone compute on it.

It proves that hone names no other device, mixes no tensors of host and device, and asks torch's functions for any
device only. It has no kernels, precision or streams of its own.
"""

from fake_npu.device import register
from hone.platforms.base import PlatformBase, PlatformRegistry

LIBRARIES = register()  # kept: the operators are removed with them


@PlatformRegistry.register(platform="fake_npu")
class FakeNpuPlatform(PlatformBase):
    """The device `npu`, in host memory."""

    device = "npu"
    vendor = "fake"
    priority = 5
    collectives_backend = "fakeccl"
    visible_devices_variable = ""
    ray_resource = "NPU"
    never_run = "the device does not exist"

    def why_unavailable(self):
        return ""
