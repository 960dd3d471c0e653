"""Section `device`: the functions of the platform itself, with results that the CPU can confirm."""

from __future__ import annotations

import time

import torch

from hone.cli.conformance.record import Absent, Recorder, require
from hone.platforms.base import PlatformBase, current_platform

COPY_MIB = 64


def device(record: Recorder) -> None:
    platform = current_platform()
    where = platform.torch_device(0)
    with record.check("find the devices") as figures:
        figures |= {"devices": platform.device_count(), "name": platform.device_name()}
        platform.set_device(0)
    with record.check("memory facts") as figures:
        memory = platform.memory()
        figures |= {"total GiB": round(memory.total / 2**30, 1), "free GiB": round(memory.free / 2**30, 1)}
        require(0 < memory.free <= memory.total, f"free is {memory.free} of {memory.total} bytes")
    with record.check("copy to the device and back") as figures:
        values = torch.arange(COPY_MIB << 18, dtype=torch.int32)
        started = time.perf_counter()
        there = values.to(where)
        platform.synchronize()
        middle = time.perf_counter()
        back = there.cpu()
        figures["to GB/s"] = _rate(values, middle - started)
        figures["back GB/s"] = _rate(values, time.perf_counter() - middle)
        require(torch.equal(back, values), "the values changed on the way")
    with record.check("streams"):
        _streams(platform, where)
    with record.check("random state"):
        _random(platform, where)
    with record.check("empty the cache"):
        platform.empty_cache()
    for dtype in platform.dtypes:
        with record.check(f"compute in {dtype}"):
            ones = torch.ones(8, dtype=getattr(torch, dtype), device=where)
            require(float((ones + ones).sum()) == 16.0, "8 x (1 + 1) is not 16")
    with record.check("limit a process to device 0") as figures:
        if not platform.visible_devices_variable:
            raise Absent("the platform has no variable for visible devices")
        figures |= dict(platform.visible_devices([0]))


def _rate(tensor: torch.Tensor, seconds: float) -> float:
    return round(tensor.nbytes / max(seconds, 1e-9) / 1e9, 2)


def _streams(platform: PlatformBase, where: torch.device) -> None:
    stream = platform.new_stream()
    if stream is None:
        raise Absent("the platform has one queue of work")
    with platform.stream(stream):
        found = torch.ones(1024, device=where).cumsum(0)
    platform.synchronize()
    require(float(found[-1]) == 1024.0, "work of a stream is not done after synchronize")


def _random(platform: PlatformBase, where: torch.device) -> None:
    platform.seed(7)
    state = platform.rng_state()
    first = torch.rand(64, device=where).cpu()
    second = torch.rand(64, device=where).cpu()
    platform.set_rng_state(state)
    again = torch.rand(64, device=where).cpu()
    require(torch.equal(first, again), "the restored state gives other numbers")
    require(not torch.equal(first, second), "the generator gives the same numbers twice")
