"""The device type `npu`, registered with torch in Python alone: operators, its module `torch.npu`, its collectives."""

import contextlib
import functools

import torch
import torch.distributed as dist
from torch.utils.backend_registration import _DummyDeviceGuard, _setup_privateuseone_for_python_backend

from fake_npu.tensor import NAME, run_operator, waits

MEMORY = 16 << 30
aten = torch.ops.aten
RESIZING = (  # torch makes an empty tensor and resizes it, which a wrapper cannot follow
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.linspace.default,
    aten.randperm.default,
    aten.eye.default,
    aten.eye.m,
)


class Stream:
    """A queue of work; this device computes at once."""

    def __init__(self, *args, **kwargs): ...
    def wait_stream(self, other): ...
    def synchronize(self): ...


class Event(Stream):
    """A point in a queue."""

    def record(self, *args): ...
    def wait(self, *args): ...
    def query(self):
        return True


class DeviceModule:
    """What `torch.npu` answers: the functions that `hone.platforms.base.PlatformBase` goes through."""

    Stream, Event = Stream, Event

    def __init__(self):
        self._generator = torch.Generator()

    def _is_in_bad_fork(self):
        return False

    def is_available(self):
        return True

    is_initialized = is_available

    def device_count(self):
        return 1

    def current_device(self):
        return 0

    def set_device(self, index):
        if torch.device(NAME, index).index != 0:
            raise ValueError(f"there is one device, found index {index}")

    def get_device_name(self, index=0):
        return "fake NPU in host memory"

    def synchronize(self, device=None):
        waits["synchronize"] += 1

    def stream(self, stream):
        return contextlib.nullcontext()

    def current_stream(self, device=None):
        return Stream()

    def mem_get_info(self, index=0):
        return MEMORY, MEMORY

    def empty_cache(self): ...

    def manual_seed(self, seed):
        self._generator.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, index=0):
        return self._generator.get_state()

    def set_rng_state(self, state, index=0):
        self._generator.set_state(state)

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]

    def memory_allocated(self, index=0):
        return 0

    memory_reserved = max_memory_allocated = memory_allocated

    def reset_peak_memory_stats(self, index=0): ...


class Guard(_DummyDeviceGuard):
    """autograd asks it for the number of devices, once in the process and before the first backward."""

    def device_count(self):
        return 1

    deviceCount = device_count


def register():
    """Register the device; once in a process."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=DeviceModule(), device_guard=Guard())
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor([...], device="npu") is made on the host, then copied
    every = torch.library.Library("_", "IMPL", "PrivateUse1")
    every.fallback(run_operator)
    makers = torch.library.Library("aten", "IMPL", "PrivateUse1")
    for operator in RESIZING:
        makers.impl(operator.name(), functools.partial(run_operator, operator))
    dist.Backend.register_backend("fakeccl", _group, devices=[NAME])
    return every, makers


def _group(store, rank, size, timeout):
    """Collectives of the device: gloo's, on the tensors' host memory."""
    return dist.ProcessGroupGloo(store, rank, size, timeout)
