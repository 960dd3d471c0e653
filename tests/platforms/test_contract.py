"""The CPU by the contract of platforms; `hone doctor --conformance` runs the same suite on other devices."""

from hone.platforms.cpu import CpuPlatform
from hone.testing import PlatformContract


class TestCpu(PlatformContract):
    def make(self):
        return CpuPlatform()
