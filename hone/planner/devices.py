"""Facts about devices: memory, speed, links, price. From `devices.yaml`, a user's file, or measured (this CPU).

8xH100 --parse--> Machine: 8 devices with the facts of H100 in `devices.yaml`
8xH200 --nodes 4--> 4 such machines
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import yaml

from hone import machine
from hone.config import ConfigError
from hone.models.numerics.products import prepare
from hone.platforms.base import compute_dtype, current_platform
from hone.registry import unknown

CPU = "cpu"
USER_FILE = "HONE_DEVICE_FACTS"  # environment variable
GIB = 2**30
CPU_CONTEXT = 0.04  # GiB: products that oneDNN compiles, pages of libraries, modules that are imported later
MEASURE_S = 0.15  # of each figure of a CPU
FEWEST_CALLS = 3
_SIDE = 768  # of the square matrices that are multiplied
_COPIED = 1 << 26  # bytes, more than caches hold


@dataclass(frozen=True, slots=True)
class Device:
    """One device. The shares are assumptions: how much of its speed programs reach."""

    name: str
    memory_gib: float
    tflops: float
    memory_gb_s: float
    link_gb_s: float
    network_gb_s: float
    price_per_hour: float = 0.0  # US dollars
    devices_per_node: int = 8
    source: str = ""
    training_share: float = 0.4  # of the operations per second, in forward and backward
    prefill_share: float = 0.5
    reading_share: float = 0.6  # of the memory's speed, in decoding
    decode_overhead_s: float = 0.003  # of a decode step beyond reading: launches, sampling
    context_gib: float = 1.0  # of a process on the device, and fragmentation; on a CPU beyond what it holds at launch
    calibrated: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # shape of a model -> timings

    @property
    def memory_bytes(self) -> int:
        return round(self.memory_gib * GIB)


@dataclass(frozen=True, slots=True)
class Machine:
    """Devices of one kind, on one or several machines."""

    device: Device
    devices: int = 1  # on each node
    nodes: int = 1

    @property
    def total(self) -> int:
        return self.devices * self.nodes

    @property
    def is_cpu(self) -> bool:
        return self.device.name == CPU

    def __str__(self) -> str:
        if self.is_cpu:
            return self.device.source
        return (
            f"{self.nodes} x {self.devices}x{self.device.name}"
            if self.nodes > 1
            else f"{self.devices}x{self.device.name}"
        )


def known_devices(extra: Path | None = None) -> dict[str, Device]:
    """All devices by name; a user's file may add devices, and replace hone's. Raises ConfigError."""
    found = _read(files("hone.planner").joinpath("devices.yaml").read_bytes(), "devices.yaml")
    mine = user_file()
    for path, key in ((mine if mine.is_file() else None, "the user's file"), (extra, "--device-facts")):
        if path is None:
            continue
        try:
            found |= _read(path.read_bytes(), str(path))
        except OSError as error:
            raise ConfigError(f"{key} {path}: {error.strerror}") from error
    return found


def user_file() -> Path:
    """The user's own file of devices: HONE_DEVICE_FACTS, or hone/devices.yaml in the folder of configurations."""
    home = os.environ.get("XDG_CONFIG_HOME", "") or "~/.config"
    return Path(os.environ.get(USER_FILE, "") or Path(home) / "hone" / "devices.yaml").expanduser()


def write_user_file(device: Device) -> Path:
    """Write the facts of a device into the user's file, over the earlier facts of this device; returns the file.

    Raises ConfigError, and leaves the file as it is, if it holds something else than facts.
    """
    path = user_file()
    facts = {key: value for key, value in asdict(device).items() if key != "name"}
    facts["calibrated"] = {
        shape: {part: [float(f"{one:.4g}") for one in numbers] for part, numbers in parts.items()}
        for shape, parts in device.calibrated.items()
    }
    table = _table(path.read_bytes(), str(path)) if path.is_file() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".yaml.partial")
    partial.write_text(yaml.safe_dump({**table, device.name: facts}, sort_keys=False), encoding="utf-8")
    partial.replace(path)
    return path


def _read(content: bytes, place: str) -> dict[str, Device]:
    return {str(name): _device(str(name), facts, place) for name, facts in _table(content, place).items()}


def _table(content: bytes, place: str) -> Mapping[Any, Any]:
    try:
        table = yaml.safe_load(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{place} is not text in UTF-8 ({error.reason} at byte {error.start}); expected YAML with device names and "
            "their facts: save it as UTF-8, or name another file"
        ) from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
        raise ConfigError(f"{place} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(table, Mapping):
        raise ConfigError(f"{place}: expected a mapping of device names to facts; see hone/planner/devices.yaml")
    return table


def _device(name: str, facts: Any, place: str) -> Device:
    known = {one.name: one for one in fields(Device) if one.name != "name"}
    if not isinstance(facts, Mapping):
        raise ConfigError(f"{place}: {name}: expected facts such as memory_gib: 80")
    for key, value in facts.items():
        if key not in known:
            raise ConfigError(f"{place}: {name}: {unknown('fact', str(key), list(known))}")
        if key == "calibrated":
            _check_calibrated(value, f"{place}: {name}.{key}")
        elif key != "source" and (not isinstance(value, int | float) or isinstance(value, bool) or value < 0):
            raise ConfigError(f"{place}: {name}.{key} is {value!r}; expected a number, 0 or more")
    missing = [
        key for key in ("memory_gib", "tflops", "memory_gb_s", "link_gb_s", "network_gb_s") if not facts.get(key)
    ]
    if missing:
        raise ConfigError(f"{place}: {name} has no {', '.join(missing)}")
    return Device(name, **facts)


def _check_calibrated(value: Any, place: str) -> None:
    """Raise ConfigError for timings of another form than `hone plan --calibrate` writes."""
    shapes = value.values() if isinstance(value, Mapping) else [None]
    numbers = [one for parts in shapes if isinstance(parts, Mapping) for one in parts.values()]
    if any(not isinstance(parts, Mapping) for parts in shapes) or not all(
        isinstance(one, list) and all(isinstance(number, int | float) for number in one) for one in numbers
    ):
        raise ConfigError(f"{place}: expected what hone plan --calibrate writes; remove it and calibrate again")


def parse_devices(text: str, nodes: int, known: Mapping[str, Device], computed: str = "float32") -> Machine:
    """Read `8xH100`, `H100`, or `8` (devices of this machine). Raises ConfigError for another text."""
    head, _, tail = text.strip().partition("x")
    count, name = (int(head), tail) if head.isdecimal() else (1, text.strip())
    if count < 1:
        raise ConfigError(f"--devices {text}: expected a number of devices above 0, such as 8xH100")
    if not name:
        return replace(this_machine(known, computed), devices=count, nodes=nodes)
    spelt = {one.casefold().replace("-", " "): one for one in known}
    exact = spelt.get(name.casefold().replace("-", " "))
    if exact is None:
        raise ConfigError(
            f"--devices {text}: {unknown('device', name, list(known))}; add your own by --device-facts FILE"
        )
    return Machine(known[exact], count, nodes)


def this_machine(known: Mapping[str, Device], computed: str = "float32") -> Machine:
    """The devices that a run here would find. A CPU that no file describes is measured with products in `computed`.

    Raises ConfigError for an accelerator that no file describes.
    """
    platform = current_platform()
    if platform.device == CPU:
        found = known.get(CPU)
        if found is None:
            return Machine(measured_cpu(compute_dtype(computed, platform)))
        total, _ = machine.memory()  # of this machine, also where a file in a shared home was written on another
        return Machine(replace(found, memory_gib=total / GIB))
    name = platform.device_name()
    for key, device in known.items():
        if key.casefold().replace("-", " ") in name.casefold():
            # not `platform.memory`, which would make a context on the device: a driver has no work there
            total = torch.get_device_module(platform.device).get_device_properties(0).total_memory
            return Machine(replace(device, memory_gib=total / GIB), platform.device_count())
    raise ConfigError(
        f"no facts about {name!r}; name a device with --devices ({', '.join(known)}), or add it by --device-facts FILE"
    )


@lru_cache(maxsize=2)
def measured_cpu(computed: str = "float32") -> Device:
    """Facts about this CPU: products of square matrices and a copy of memory, timed once for a moment."""
    total, _ = machine.memory()
    return Device(
        name=CPU,
        memory_gib=total / GIB,
        tflops=_operations_per_s(getattr(torch, computed)) / 1e12,
        memory_gb_s=_bytes_per_s() / 1e9,
        link_gb_s=_bytes_per_s() / 1e9,
        network_gb_s=1.0,
        devices_per_node=1,
        source=f"{current_platform().device_name()}, measured",
        training_share=0.5,
        prefill_share=0.7,
        reading_share=0.7,
        decode_overhead_s=0.002,
        context_gib=CPU_CONTEXT,
    )


def _operations_per_s(dtype: torch.dtype) -> float:
    prepare(dtype)  # the way in which models multiply here
    a, b = torch.ones(_SIDE, _SIDE, dtype=dtype), torch.ones(_SIDE, _SIDE, dtype=dtype)
    return 2 * _SIDE**3 / _seconds_each(lambda: torch.mm(a, b))


def _bytes_per_s() -> float:
    source = torch.ones(_COPIED // 4)
    target = torch.empty_like(source)
    return 2 * _COPIED / _seconds_each(lambda: target.copy_(source))


def _seconds_each(work: Any) -> float:
    """The shortest of several calls within `MEASURE_S`, after one that does not count.

    It is the processor time of this thread, which does its share of the work: what the call takes if nothing else runs.
    """
    work()
    found, end = list[float](), time.monotonic() + MEASURE_S
    while time.monotonic() < end or len(found) < FEWEST_CALLS:
        begin = time.thread_time()
        work()
        found.append(time.thread_time() - begin)
    return max(min(found), sys.float_info.epsilon)


__all__ = ["CPU", "GIB", "Device", "Machine", "known_devices", "measured_cpu", "parse_devices", "this_machine"]
