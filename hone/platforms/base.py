"""The contract of a platform, the registry of platforms, and the choice of one.

    HONE_PLATFORM set --> that platform, or an error that says why not
    else              --> of all registered platforms that are available here, the one with the highest priority

A vendor's package adds its hardware without a change in hone:

    @PlatformRegistry.register(platform="my_vendor")
    class MyPlatform(PlatformBase):
        device, vendor = "npu", "my_vendor"
        ...
"""

from __future__ import annotations

import functools
import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch

from hone.config import ConfigError
from hone.platforms import PLATFORMS
from hone.platforms.sharing import MemorySharing
from hone.plugins import load_plugins
from hone.registry import CannotLoad, unknown

TRITON_SWITCH = "HONE_TRITON"  # environment variable; 0: PyTorch's operations in place of hone's Triton kernels
TRITON_INTERPRETER = "TRITON_INTERPRET"  # Triton's own; 1: kernels run on a CPU, slowly
PLATFORM_VARIABLE = "HONE_PLATFORM"
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Memory of one device, in bytes."""

    total: int
    free: int  # for anybody
    allocated: int  # by this process, in tensors
    reserved: int  # by this process, caches included
    peak: int  # most that was allocated so far


@dataclass(frozen=True, slots=True)
class Recording:
    """Work that was recorded as a graph."""

    replay: Callable[[], object]  # queues the work anew: over what its inputs hold then, into `result`
    result: torch.Tensor
    memory: Any = None  # what the work allocated it in, in the platform's terms


class PlatformBase(MemorySharing, ABC):
    """One kind of device. The defaults go through torch's own module for the device (`torch.cuda`, `torch.npu` ...).

    A platform whose torch module has the usual functions sets the class attributes and writes `why_unavailable`; one
    that differs overrides the methods that differ. The class attributes are the platform's table of facts
    (`facts.facts_of`); `sources` says where each was found. `MemorySharing` has what the weight sync calls.
    """

    name: ClassVar[str]  # in the registry; `PlatformRegistry.register` sets it
    device: ClassVar[str]  # torch's name of the device type: "cuda", "npu", "cpu"
    vendor: ClassVar[str]  # with `device`, what an engine is registered for: "nvidia", "amd"
    priority: ClassVar[int] = 10  # of several available platforms, the highest is taken; `cpu` has 0
    collectives_backend: ClassVar[str]  # for torch.distributed: "nccl", "gloo", "hccl"
    visible_devices_variable: ClassVar[str]  # environment variable that hides devices from a process; "" if none
    ray_resource: ClassVar[str] = "GPU"  # what Ray calls a device of this kind
    ray_override_variables: ClassVar[tuple[str, ...]] = ()  # with one set to 1, Ray hides no devices from its actors
    allocator_variable: ClassVar[str] = ""  # environment variable with the settings of torch's allocator; "" if none
    attention_kernels: ClassVar[tuple[str, ...]] = ("sdpa",)  # "varlen": packed rows; "flex": caps, sinks
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16")  # that the devices compute in
    fused_optimizers: ClassVar[bool] = False  # whether torch.optim's `fused=True` runs on the devices
    determinism: ClassVar[tuple[str, str]] = ("", "")  # variable and value without which products do not repeat
    compiles_triton: ClassVar[bool] = False  # whether Triton compiles hone's kernels for the devices
    records_graphs: ClassVar[bool] = False  # whether `record` is written for the devices
    grouped_products: ClassVar[tuple[str, ...]] = ()  # dtypes of torch's `grouped_mm` where bfloat16 is native
    profiler_activity: ClassVar[str] = ""  # member of `torch.profiler.ProfilerActivity` besides CPU; "" if none
    architectures: ClassVar[tuple[str, ...]] = ()  # chips that the vendor's builds of torch and vLLM are made for
    packages: ClassVar[tuple[str, ...]] = ()  # distributions of the vendor whose versions a report names
    container: ClassVar[str] = ""  # options of `docker run` that give a container the devices
    never_run: ClassVar[str] = ""  # which parts of hone never ran on such a device, for a person; "" if all did
    sources: ClassVar[Mapping[str, str]] = {}  # name of a fact -> where it was found

    @abstractmethod
    def why_unavailable(self) -> str:
        """Empty if this process can compute on the platform, else the reason why not, for a person."""

    # -------------------------------------------------------------------------------------------------- devices

    def device_count(self) -> int:
        """Devices that this process sees."""
        return int(self._module.device_count())

    def torch_device(self, index: int = 0) -> torch.device:
        return torch.device(self.device, index)

    def set_device(self, index: int) -> None:
        """Make device `index` the current one of this thread."""
        self._module.set_device(index)

    def device_name(self, index: int = 0) -> str:
        """Return the maker's name of the device."""
        return str(self._module.get_device_name(index))

    def why_bfloat16_is_slow(self) -> str:
        """Empty if the devices multiply bfloat16 natively, else what they lack: then float32 is faster."""
        return ""

    def synchronize(self) -> None:
        """Wait until everything queued on the current device is done."""
        self._module.synchronize()

    def new_stream(self) -> Any:
        """An additional queue of work (stream); None where the platform has only one."""
        return self._module.Stream()

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Queue the block's work on a stream from `new_stream`."""
        context: AbstractContextManager[Any] = self._module.stream(stream)
        return context

    def record(self, work: Callable[[], torch.Tensor], beside: Recording | None = None) -> Recording:
        """Record the work that a function queues on the current device, which may run once or more meanwhile.

        The function must not read a tensor on the host, and what it reads must stay at its address. What it allocates
        it shares with the recording `beside`, which must still exist: a result is then valid until either is replayed.
        """
        raise NotImplementedError(f"platform {self.name} records no graphs")

    def collectives(self) -> str:
        """Backends of `torch.distributed`: gloo for CPU memory, this platform's own for its devices."""
        if self.device == "cpu":
            return self.collectives_backend
        return f"cpu:gloo,{self.device}:{self.collectives_backend}"

    # --------------------------------------------------------------------------------------------------- memory

    def memory(self, index: int | None = None) -> MemoryFacts:
        """Facts about one device's memory, in bytes; None: of the device that this process computes on."""
        free, total = self._module.mem_get_info(index)
        return MemoryFacts(
            total=int(total),
            free=int(free),
            allocated=int(self._module.memory_allocated(index)),
            reserved=int(self._module.memory_reserved(index)),
            peak=int(self._module.max_memory_allocated(index)),
        )

    def empty_cache(self) -> None:
        """Give cached, unused device memory back to the system."""
        self._module.empty_cache()

    # --------------------------------------------------------------------------------------------------- random

    def seed(self, seed: int) -> None:
        """Seed torch's generators: of the CPU, and of all devices of this platform."""
        torch.manual_seed(seed)  # does the devices' too
        self._module.manual_seed_all(seed)

    def rng_state(self) -> dict[str, torch.Tensor]:
        """The state of every torch generator, by device name: uint8 tensors in CPU memory that own their storage."""
        states = {"cpu": torch.get_rng_state().clone()}
        for index in range(self.device_count()):
            states[str(self.torch_device(index))] = self._module.get_rng_state(index).cpu().clone()
        return states

    def set_rng_state(self, states: Mapping[str, torch.Tensor]) -> None:
        """Restore what `rng_state` gave, of the devices that this process sees too: a run may go on with others."""
        torch.set_rng_state(states["cpu"])
        for index in range(self.device_count()):
            if (name := str(self.torch_device(index))) in states:
                self._module.set_rng_state(states[name], index)

    # ------------------------------------------------------------------------------------------ other processes

    def visible_devices(self, indices: Sequence[int]) -> dict[str, str]:
        """The environment that shows a new process only these of the devices that this process sees.

        Raises ValueError for a device that is hidden from this process.
        """
        if not self.visible_devices_variable:
            return {}
        now = [entry for entry in os.environ.get(self.visible_devices_variable, "").split(",") if entry]
        beyond = [index for index in indices if now and index >= len(now)]
        if beyond:
            shown = f"{self.visible_devices_variable}={','.join(now)}"
            raise ValueError(f"device {beyond[0]} was asked for, but {shown} shows {len(now)}")
        chosen = [now[index] if now else str(index) for index in indices]
        return {self.visible_devices_variable: ",".join(chosen)}

    def rollout_environment(self, indices: Sequence[int]) -> dict[str, str]:
        """Environment variables for a rollout server that runs on these devices."""
        return self.visible_devices(indices)

    def rollout_options(self, backend: str, nodes: int) -> dict[str, Any]:
        """Options, by the engine's own names, that a rollout server needs on this platform; run files override them.

        `backend` is the rollout engine (such as "vllm"), `nodes` the number of machines that run servers.
        """
        return {}

    def why_no_sleep(self, backend: str) -> str:
        """Empty if a rollout server can give its device memory back (`rollout.sleep_while_training`), else why not."""
        return ""

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.device)


P = TypeVar("P", bound=type[PlatformBase])


class PlatformRegistry:
    """The platforms there are, and which of them are available here."""

    @staticmethod
    def register(*, platform: str) -> Callable[[P], P]:
        """Class decorator: make a `PlatformBase` subclass known under a name."""

        def add(cls: P) -> P:
            if not (isinstance(cls, type) and issubclass(cls, PlatformBase)):
                raise TypeError(f"platform {platform!r}: {cls!r} is not a subclass of PlatformBase")
            missing = [name for name in REQUIRED if not hasattr(cls, name)]
            if missing:
                raise TypeError(f"platform {platform!r}: {cls.__name__} does not set {', '.join(missing)}")
            PLATFORMS.register(platform, cls)
            cls.name = platform
            return cls

        return add

    @staticmethod
    def probe() -> dict[str, str]:
        """Every platform, plug-ins included: empty if it is available here, else the reason why not."""
        return {name: PlatformRegistry._probe_one(name)[1] for name in PLATFORMS}

    @staticmethod
    def choose(name: str = "") -> PlatformBase:
        """The named platform, or without a name the available one of highest priority.

        Raises ConfigError: unknown or unavailable name (with every platform and its reason), or a tie.
        """
        plugins = load_plugins()
        found: dict[str, PlatformBase] = {}
        reasons: dict[str, str] = {}
        for known in PLATFORMS:
            platform, reasons[known] = PlatformRegistry._probe_one(known)
            if platform is not None and not reasons[known]:
                found[known] = platform
        if name:
            return _named(name, found, reasons, plugins)
        best = max(platform.priority for platform in found.values())
        first, *others = [known for known, platform in found.items() if platform.priority == best]
        if others:
            raise ConfigError(
                f"several platforms are available here: {', '.join([first, *others])}; set {PLATFORM_VARIABLE} to one"
            )
        return found[first]

    @staticmethod
    def _probe_one(name: str) -> tuple[PlatformBase | None, str]:
        try:
            platform: PlatformBase = PLATFORMS.get(name)()
            return platform, platform.why_unavailable()
        except CannotLoad as error:
            return None, str(error)
        except Exception as error:  # noqa: BLE001  a plug-in's probe is foreign code; its failure is the reason shown
            return None, f"its probe failed: {type(error).__name__}: {error}"


REQUIRED = ("device", "vendor", "collectives_backend", "visible_devices_variable")


def _named(
    name: str, found: Mapping[str, PlatformBase], reasons: Mapping[str, str], plugins: Mapping[str, str]
) -> PlatformBase:
    if name in found:
        return found[name]
    if name in reasons:
        problem = f"platform {name!r} is not available: {reasons[name]}"
    else:
        problem = unknown("platform", name, list(reasons))
    also = [f"{other}: {reason or 'available'}" for other, reason in reasons.items() if other != name]
    broken = [f"plug-in {plugin} failed: {reason}" for plugin, reason in plugins.items() if reason]
    raise ConfigError(f"{PLATFORM_VARIABLE}={name}: {problem}; {'; '.join([*also, *broken])}")


def compute_dtype(chosen: str, platform: PlatformBase) -> str:
    """The dtype that a setting `compute_dtype` stands for: `auto` is bfloat16 where multiplied natively, else float32.

    Each process resolves `auto` on its own machine; a rank that chooses another dtype than its driver refuses to start.
    """
    if chosen != AUTO:
        return chosen
    return "float32" if platform.why_bfloat16_is_slow() else "bfloat16"


def why_compute_dtype(chosen: str, platform: PlatformBase) -> str:
    """Why a setting `compute_dtype` stands for what it does on the platform, for a person."""
    if chosen != AUTO:
        return "as set"
    return f"auto: {platform.why_bfloat16_is_slow() or f'{platform.name} multiplies bfloat16 natively here'}"


def why_no_triton(platform: PlatformBase) -> str:
    """Empty if hone's Triton kernels run on the platform's devices in this process, else why not, for a person."""
    if os.environ.get(TRITON_SWITCH) == "0":
        return f"{TRITON_SWITCH}=0"
    interpreted = os.environ.get(TRITON_INTERPRETER) == "1"
    if not (platform.compiles_triton or interpreted):
        return f"Triton compiles no kernels for {platform.name} ({TRITON_INTERPRETER}=1 interprets them, for tests)"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed, which torch for GPUs brings on Linux: pip install triton"
    old = "" if interpreted else platform.why_bfloat16_is_slow()
    return f"{old}, as does Triton" if old else ""


def use_deterministic_kernels() -> None:
    """Let torch use only kernels that repeat to the bit. Call it before this process's first product on a device."""
    variable, value = current_platform().determinism
    if variable:
        os.environ.setdefault(variable, value)
    torch.use_deterministic_algorithms(True)


def current_platform() -> PlatformBase:
    """The platform of this process: `HONE_PLATFORM`, or what probing finds. Chosen once for each value."""
    return _chosen(os.environ.get(PLATFORM_VARIABLE, ""))


@functools.cache
def _chosen(name: str) -> PlatformBase:
    return PlatformRegistry.choose(name)
