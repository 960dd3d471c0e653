"""Buckets in host memory are page-locked by the platform of the sender, and released before they go."""

import pytest
import torch

from hone.platforms.base import PLATFORM_VARIABLE, PlatformRegistry, current_platform
from hone.platforms.cpu import CpuPlatform
from hone.registry import Registry
from hone.weights.transports.ipc.memory import SharedBuffers


class Pinning(CpuPlatform):
    """Keeps account of what is page-locked."""

    refuses = False

    def __init__(self):
        super().__init__()
        self.pinned = []

    def pin(self, memory):
        if not self.refuses:
            self.pinned.append((memory.data_ptr(), memory.nbytes))
        return not self.refuses

    def unpin(self, memory):
        self.pinned.remove((memory.data_ptr(), memory.nbytes))


class Refusing(Pinning):
    refuses = True


@pytest.fixture
def platform(monkeypatch):
    monkeypatch.setattr(
        "hone.platforms.base.PLATFORMS", Registry("platform", {"cpu": "hone.platforms.cpu:CpuPlatform"})
    )

    def use(kind):
        name = f"test_{kind.__name__.lower()}"
        monkeypatch.setenv(PLATFORM_VARIABLE, name)
        PlatformRegistry.register(platform=name)(kind)
        return current_platform()

    return use


def test_both_buckets_are_page_locked_until_they_are_closed(platform):
    found = platform(Pinning)
    buffers = SharedBuffers(1 << 16)
    assert found.pinned == [(tensor.data_ptr(), 1 << 16) for tensor in buffers.tensors]
    buffers.close()
    assert found.pinned == []
    buffers.close()


def test_buckets_that_cannot_be_page_locked_are_used_all_the_same(platform):
    found = platform(Refusing)
    buffers = SharedBuffers(1 << 16)
    assert found.pinned == []
    buffers.tensors[1].fill_(7)
    buffers.close()


def test_a_cpu_page_locks_nothing():
    assert CpuPlatform().pin(torch.zeros(8)) is False
