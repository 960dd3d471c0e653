"""A platform whose processes have devices by name, so that a machine without any can place receivers by device."""

import os

from hone.platforms.base import PLATFORM_VARIABLE, PlatformRegistry
from hone.platforms.cpu import CpuPlatform

SEEN = "HONE_TEST_DEVICES"
NAME = "named_devices"


class NamedDevices(CpuPlatform):
    """A CPU whose process sees named devices; their memory cannot be shared."""

    def device_uuids(self):
        return os.environ[SEEN].split(",")


def have_devices(*names):
    """Let this process see these devices, its own first; without names, it stays as it is."""
    if names:
        os.environ |= {SEEN: ",".join(names), PLATFORM_VARIABLE: NAME}
        PlatformRegistry.register(platform=NAME)(NamedDevices)
