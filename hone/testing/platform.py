"""The contract of a platform: the functions of a kind of device, with results that the CPU can confirm."""

from __future__ import annotations

import time

import torch

from hone.platforms.base import REQUIRED, PlatformBase, current_platform
from hone.platforms.facts import facts_of
from hone.testing.contract import Absent, Contract, require

COPY_MIB = 64


class PlatformContract(Contract):
    """Contract of `hone.platforms.base.PlatformBase`, on the first device."""

    def make(self) -> PlatformBase:
        """Return the platform, which has to be available; by default the one of this process."""
        return current_platform()

    def test_find_the_devices(self) -> None:
        """find the devices"""
        platform = self.make()
        missing = [name for name in REQUIRED if not isinstance(getattr(platform, name, None), str)]
        require(not missing, f"the platform does not set {', '.join(missing)}")
        why = platform.why_unavailable()
        require(not why, f"the platform is not available: {why}")
        self.figures |= {"devices": platform.device_count(), "name": platform.device_name()}
        require(platform.device_count() >= 1, "there is no device")
        require(platform.torch_device(0).type == platform.device, f"{platform.torch_device(0)} is no {platform.device}")
        platform.set_device(0)

    def test_memory_facts(self) -> None:
        """memory facts"""
        memory = self.make().memory()
        self.figures |= {"total GiB": round(memory.total / 2**30, 1), "free GiB": round(memory.free / 2**30, 1)}
        require(0 < memory.free <= memory.total, f"free is {memory.free} of {memory.total} bytes")
        require(memory.peak >= memory.allocated, f"the peak is {memory.peak}, less than {memory.allocated} bytes now")

    def test_copies(self) -> None:
        """copy to the device and back"""
        platform = self.make()
        values = torch.arange(COPY_MIB << 18, dtype=torch.int32)
        started = time.perf_counter()
        there = values.to(platform.torch_device(0))
        platform.synchronize()
        middle = time.perf_counter()
        back = there.cpu()
        self.figures["to GB/s"] = _rate(values, middle - started)
        self.figures["back GB/s"] = _rate(values, time.perf_counter() - middle)
        require(torch.equal(back, values), "the values changed on the way")

    def test_streams(self) -> None:
        """streams"""
        platform = self.make()
        stream = platform.new_stream()
        if stream is None:
            raise Absent("the platform has one queue of work")
        with platform.stream(stream):
            found = torch.ones(1024, device=platform.torch_device(0)).cumsum(0)
        platform.synchronize()
        require(float(found[-1]) == 1024.0, "work of a stream is not done after synchronize")

    def test_random_state(self) -> None:
        """random state"""
        platform = self.make()
        where = platform.torch_device(0)
        before = platform.rng_state()
        try:
            platform.seed(7)
            state = platform.rng_state()
            first = torch.rand(64, device=where).cpu()
            second = torch.rand(64, device=where).cpu()
            platform.set_rng_state(state)
            again = torch.rand(64, device=where).cpu()
            platform.seed(7)
            seeded = torch.rand(64, device=where).cpu()
        finally:
            platform.set_rng_state(before)
        require(torch.equal(first, again), "the restored state gives other numbers")
        require(not torch.equal(first, second), "the generator gives the same numbers twice")
        require(torch.equal(first, seeded), "the same seed gives other numbers")

    def test_empty_the_cache(self) -> None:
        """empty the cache"""
        self.make().empty_cache()

    def test_dtypes(self) -> None:
        """compute in every dtype of its table"""
        platform = self.make()
        require(bool(platform.dtypes), "the platform computes in no dtype")
        for dtype in platform.dtypes:
            ones = torch.ones(8, dtype=getattr(torch, dtype), device=platform.torch_device(0))
            require(float((ones + ones).sum()) == 16.0, f"8 x (1 + 1) is not 16 in {dtype}")
        self.figures["dtypes"] = " ".join(platform.dtypes)

    def test_visible_devices(self) -> None:
        """limit a process to device 0"""
        platform = self.make()
        if not platform.visible_devices_variable:
            raise Absent("the platform has no variable for visible devices")
        found = platform.visible_devices([0])
        self.figures |= dict(found)
        require(set(found) == {platform.visible_devices_variable}, f"device 0 is chosen by {found}")

    def test_facts_have_sources(self) -> None:
        """sources belong to facts"""
        platform = self.make()
        facts = facts_of(platform)
        unknown = sorted(set(platform.sources) - {fact.name for fact in facts})
        require(not unknown, f"sources names what is no fact of a platform: {', '.join(unknown)}")
        self.figures["facts with a source"] = f"{sum(bool(fact.source) for fact in facts)} of {len(facts)}"


def _rate(tensor: torch.Tensor, seconds: float) -> float:
    return round(tensor.nbytes / max(seconds, 1e-9) / 1e9, 2)
