"""The runtime `tinker`: every role is in this process, and the policy's engine and rollout use the service."""

from __future__ import annotations

from typing import Any

from hone.config import count_as_read
from hone.runtime.base import PhaseFn
from hone.runtime.local import LocalWorkerGroup
from hone.runtime.settings import RuntimeConfig


class ServiceWorkerGroup(LocalWorkerGroup):
    """See `LocalWorkerGroup`."""

    @classmethod
    def place(cls, role: str, worker_class: Any, spec: Any, runtime: RuntimeConfig, phase: PhaseFn) -> LocalWorkerGroup:
        count_as_read(runtime.backend)  # the engine's settings have the same keys, and it reads those
        return super().place(role, worker_class, spec, runtime, phase)
