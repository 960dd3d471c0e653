"""Patches that let SGLang 0.5.23 run on CPUs: stand-ins for libraries that it imports, and one kernel.

Importing this file applies the patches if `SGLANG_USE_CPU_ENGINE=1`, and only for libraries that are not installed.
SGLang's own CPU build brings `sgl_kernel`, but must be compiled from source
(https://github.com/sgl-project/sglang/blob/main/docs/platforms/cpu_server.md). Does not import SGLang.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

import torch
from transformers.utils import import_utils

ABSENT = (
    "sgl_kernel",  # kernels; imported everywhere, called only with CUDA or AMX
    "torchaudio",  # of multimodal models
    "torchvision",  # for multimodal models; its CUDA build cannot be imported with a CPU torch
)


class _Name:
    """A name in an absent library: it can be imported and passed on; using it is an error."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __getattr__(self, name: str) -> _Name:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(f"{self._path}.{name}")

    def __call__(self, *arguments: Any, **named: Any) -> NoReturn:
        raise RuntimeError(f"{self._path} is not installed: it is not needed on a CPU, but was called")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(f"{self.__name__}.{name}")


class _StandIns(MetaPathFinder, Loader):
    """Finder for modules of absent libraries; installed ones are found first."""

    def __init__(self, absent: Sequence[str]) -> None:
        self._absent = tuple(absent)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self._absent:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module empty."""


def install_stand_ins(absent: Sequence[str] = ABSENT) -> list[str]:
    """Make `import <name>` succeed for libraries of `absent` that are not installed; return their names."""
    missing = [name for name in absent if name not in sys.modules and importlib.util.find_spec(name) is None]
    if missing:
        import_utils.is_torchvision_available()  # cache the answer "absent" in transformers
        sys.meta_path.append(_StandIns(missing))
    return missing


# ------------------------------------------------------------------------------------------------- random numbers

BITS = 0xFFFFFFFF


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Hash seed, position and column with MurmurHash3 (x86, 32 bits), as random bits of each request and token.

    seed [n] (64 bits), positions [n], columns [m] -> uint32 [n, m], as in
    https://github.com/aappleby/smhasher/blob/master/src/MurmurHash3.cpp (public domain), hash seed 0, 16 bytes.
    """
    seed = seed.view(torch.int64)[:, None]
    blocks = (seed & BITS, (seed >> 32) & BITS, positions.long()[:, None] & BITS, columns.long()[None, :] & BITS)
    h = torch.zeros((), dtype=torch.int64)
    for block in blocks:
        mixed = (_rotated((block * 0xCC9E2D51) & BITS, 15) * 0x1B873593) & BITS
        h = (_rotated(h ^ mixed, 13) * 5 + 0xE6546B64) & BITS
    h = h ^ 16  # number of hashed bytes
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = ((h ^ (h >> shift)) * factor) & BITS
    return (h ^ (h >> 16)).to(torch.uint32)


def _rotated(x: torch.Tensor, bits: int) -> torch.Tensor:
    return ((x << bits) | (x >> (32 - bits))) & BITS


def install_hash() -> torch.library.Library:
    """Define the `sgl_kernel` operator that SGLang's sampling calls on a CPU; it exists while the result is kept."""
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
    library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
    return library


# --------------------------------------------------------------------------------------------------- pinned memory


class Unpinned:
    """torch without pinned memory, for a module of SGLang that always asks for it; pinning fails without a GPU.

    (https://github.com/sgl-project/sglang/blob/main/python/sglang/srt/lora/layers.py)
    """

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        return _unpinned(found) if name in ("empty", "tensor", "zeros") else found


def _unpinned(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*arguments: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
        return factory(*arguments, **named)

    return make


if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" and "sgl_kernel" in install_stand_ins():
    _OPERATORS = install_hash()

__all__ = ["ABSENT", "Unpinned", "install_hash", "install_stand_ins", "murmur_hash32"]
