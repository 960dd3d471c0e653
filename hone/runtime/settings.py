"""Settings of where workers run."""

from __future__ import annotations

from typing import Annotated

from hone.config import Choice, Config, FromRegistry, setting
from hone.runtime import RUNTIMES


class RaySettings(Choice):
    """Ranks as actors of a Ray cluster, called by one driver."""

    name: str = "ray"
    devices: int = setting(1, "ranks on each node, one for each device; on CPUs, one process each", ge=1)
    nodes: int = setting(1, "machines of the cluster that ranks are placed on", ge=1)
    address: str = setting(
        "", "the cluster: host:port, auto (found on this machine), local (started here); empty: local with one node"
    )
    stall_timeout_s: float = setting(
        1800.0,
        "longest time in which no rank ends a call; then all stacks are shown and the run ends",
        unit="s",
        gt=0,
    )
    start_timeout_s: float = setting(120.0, "longest wait for devices, and for the ranks to start", unit="s", gt=0)
    bucket_mib: int = setting(256, "weights on their way from the ranks at a time; two are held", unit="MiB", ge=1)


class RuntimeConfig(Config):
    """Who hosts the workers, and with what."""

    backend: Annotated[Choice, FromRegistry(RUNTIMES)] = setting(
        meaning="what places the workers: local is this process, ray is a cluster", factory=lambda: Choice(name="local")
    )
    threads: int = setting(0, "CPU threads of a worker; 0: all cores that this process may use", ge=0)
    collective_timeout_s: float = setting(1800.0, "longest wait of one rank for the others", unit="s", gt=0)
    deterministic: bool = setting(False, "only deterministic GPU kernels: bit-equal resume at a cost in speed")
