"""Registry of engine classes by model type, backend, device and vendor; a class is imported when chosen."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from hone.plugins import load_plugins
from hone.registry import CannotLoad, Entry, Registry, UnknownName, resolve, unknown

if TYPE_CHECKING:  # settings are read without torch
    from hone.engines.base import BaseEngine, EngineSpec

ANY = "*"
DEVICE_VARIABLE = "HONE_ENGINE_DEVICE"
VENDOR_VARIABLE = "HONE_ENGINE_VENDOR"

SCHEDULES = Registry(
    "schedule",
    {
        "constant": Entry("hone.engines.optimizers:constant", "hone.engines.settings:ScheduleConfig"),
        "linear": Entry("hone.engines.optimizers:linear", "hone.engines.settings:LinearConfig"),
        "cosine": Entry("hone.engines.optimizers:cosine", "hone.engines.settings:CosineConfig"),
        "wsd": Entry("hone.engines.optimizers:wsd", "hone.engines.settings:WsdConfig"),
    },
)
"""Name -> function `(settings, warm-up, total steps)` that gives the factor of a step after the warm-up."""


@dataclass(frozen=True, slots=True)
class Package:
    """The optional package of a backend."""

    module: str
    distribution: str
    install: str  # the command that adds it to hone's environment

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None


C = TypeVar("C", bound=type)
Key = tuple[str, str, str, str]


class EnginePlatform(Protocol):
    """The facts about a platform that choose an engine."""

    @property
    def device(self) -> str:
        """torch's device type: cpu, cuda, npu ..."""

    @property
    def vendor(self) -> str:
        """Vendor: generic, nvidia, amd ..."""


class _EngineRegistry:
    """(model type, backend, device, vendor) -> engine class; `*` for device or vendor means any.

    A class that names the device and vendor wins over one that names the device only, and that one over `*`.
    """

    def __init__(self) -> None:
        self._entries: dict[Key, Any] = {}
        self.packages: dict[str, Package] = {}  # backend -> the optional package that it needs
        self.backends = Registry("training engine")  # name -> its first class, and the settings that only it has

    def register(
        self,
        *,
        model_type: str | Sequence[str],
        backend: str,
        device: str = ANY,
        vendor: str = ANY,
        target: str | None = None,
        settings: str | Any = "hone.engines.settings:BackendSettings",
        package: Package | None = None,
    ) -> Callable[[C], C]:
        """Register `target` ("module:class"), or the class that this decorates. A key is registered once.

        `settings` is the class of the backend's own settings, a `BackendSettings`, and `package` what has to be
        installed for it; the first registration of a backend decides on both.
        """
        types = [model_type] if isinstance(model_type, str) else list(model_type)

        def add(cls: C | str) -> Any:
            for one in types:
                key = (one, backend, device, vendor)
                if key in self._entries:
                    raise ValueError(f"engine {_show(key)} is already registered as {self._entries[key]!r}")
                self._entries[key] = cls
            if not self.backends.has(backend):
                self.backends.register(backend, cls, settings)
                if package is not None:
                    self.packages[backend] = package
            return cls

        if target is not None:
            add(target)
        return add

    def find(self, model_type: str, backend: str, device: str, vendor: str) -> type[BaseEngine]:
        """The engine class. Raises UnknownName listing what exists, or CannotLoad with the import's own reason."""
        load_plugins()  # one may have a class for this device
        for key in ((model_type, backend, device, vendor), (model_type, backend, device, ANY)):
            if key in self._entries:
                return self._load(key)
        key = (model_type, backend, ANY, ANY)
        if key not in self._entries:
            raise UnknownName(self._explain(model_type, backend, device, vendor))
        return self._load(key)

    def create(self, spec: EngineSpec, platform: EnginePlatform) -> BaseEngine:
        """The engine that `spec` asks for on `platform`; the two environment variables override the platform."""
        device = os.environ.get(DEVICE_VARIABLE) or platform.device
        vendor = os.environ.get(VENDOR_VARIABLE) or platform.vendor
        cls: Any = self.find(spec.model_type, spec.engine.backend.name, device, vendor)
        engine: BaseEngine = cls(spec, device)
        return engine

    def target(self, key: Key) -> str:
        """Return the location of a key's class, as text, without importing it."""
        target = self._entries[key]
        return target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}"

    def __iter__(self) -> Any:
        load_plugins()
        return iter(sorted(self._entries))

    def _load(self, key: Key) -> type[BaseEngine]:
        target = self._entries[key]
        if not isinstance(target, str):
            return target  # type: ignore[no-any-return]
        package = self.packages.get(key[1])
        if package is not None and not package.is_installed:
            raise CannotLoad(
                f"training engine {key[1]!r} needs {package.distribution}, which is not installed: {package.install}"
            )
        try:
            return resolve(target)  # type: ignore[no-any-return]
        except (ImportError, AttributeError) as error:
            raise CannotLoad(f"engine {_show(key)} ({target}) cannot be loaded: {error}") from error

    def _explain(self, model_type: str, backend: str, device: str, vendor: str) -> str:
        if backend not in self.backends:
            return unknown("training engine", backend, list(self.backends))
        there = "; ".join(_show(key) for key in self)
        return f"no engine for {_show((model_type, backend, device, vendor))} (there is: {there})"


def _show(key: Key) -> str:
    return "model_type={} backend={} device={} vendor={}".format(*key)


EngineRegistry = _EngineRegistry()
EngineRegistry.register(
    model_type=("language_model", "value_model"),
    backend="fsdp2",
    target="hone.engines.fsdp2.engine:Fsdp2Engine",
    settings="hone.engines.fsdp2.settings:Fsdp2Settings",
)
