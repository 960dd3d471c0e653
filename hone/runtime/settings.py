"""Settings of where workers run."""

from __future__ import annotations

from typing import Annotated

from hone.config import Choice, Config, FromRegistry, setting
from hone.runtime import RUNTIMES


class RuntimeConfig(Config):
    """Who hosts the workers, and with what."""

    backend: Annotated[Choice, FromRegistry(RUNTIMES)] = setting(
        meaning="what places the workers: local is this process", factory=lambda: Choice(name="local")
    )
    threads: int = setting(0, "CPU threads of a worker; 0: all cores that this process may use", ge=0)
    collective_timeout_s: float = setting(1800.0, "longest wait of one rank for the others", unit="s", gt=0)
    deterministic: bool = setting(False, "only deterministic GPU kernels: bit-equal resume at a cost in speed")
