"""Choose the machines of rollout servers, and a weight sync that reaches them."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from pathlib import Path
from socket import gaierror, gethostbyname

from hone.config import Choice, ConfigError, count_as_read
from hone.rollout.servers.attached import AttachedHost
from hone.rollout.servers.host import Host, LocalHost
from hone.runtime import RUNTIMES
from hone.runtime.base import ServerDevices
from hone.runtime.settings import RuntimeConfig
from hone.weights import LOOPBACK
from hone.weights.settings import CollectiveSettings, DeltaSettings, DiskSettings, WeightSyncConfig
from hone.workers.hosts.cluster import ClusterHost
from hone.workers.hosts.spanning import SpanningHost


def hosts_of(role: str, count: int, devices: int, runtime: RuntimeConfig | None, logs: Path) -> list[Host]:
    """Choose the hosts of a role's `count` servers, each with `devices` devices. Raises ConfigError."""
    placed: Sequence[Sequence[ServerDevices]] = ()
    if runtime is not None:
        placed = RUNTIMES.get(runtime.backend.name).server_devices(role, "actor", count, devices, runtime)
    hosts: list[Host] = []
    for number, machines in enumerate(placed):
        name = f"server {number} of {role}"
        alone = len(machines) == 1
        hosts.append(ClusterHost(name, machines[0], logs) if alone else SpanningHost(name, machines, logs))
    return hosts or [LocalHost() for _ in range(count)]


def driver_of(hosts: Sequence[Host]) -> str:
    """Return the address at which other machines reach this one; loopback if there are no others."""
    placed = (one for one in hosts if isinstance(one, ClusterHost | SpanningHost | AttachedHost))
    return next((one.driver for one in placed if one.machine), LOOPBACK)


def reaching(config: WeightSyncConfig, hosts: Sequence[Host]) -> WeightSyncConfig:
    """Adapt the settings of the weight sync so that they reach these machines.

    Raises ConfigError for a chosen transport that works on this machine only.
    """
    others = sorted({one.machine for one in hosts if one.machine})
    if not others:
        return config
    chosen: Choice | None = config.transport
    problem = f"and {sum(bool(one.machine) for one in hosts)} of {len(hosts)} rollout servers are on other machines"
    if isinstance(chosen, DiskSettings) and not chosen.folder:
        raise ConfigError(
            f"weights.transport.folder: without one, disk writes into this machine's temporary folder, {problem}; "
            "name a folder that all machines see, or choose collective"
        )
    over_ipc = isinstance(chosen, DeltaSettings) and chosen.over == "ipc"
    if chosen is not None and (chosen.name == "ipc" or over_ipc):
        key = "weights.transport.over" if over_ipc else "weights.transport"
        raise ConfigError(
            f"{key}: ipc is memory of this machine, {problem}; choose collective"
            + ("" if over_ipc else ", delta, or disk with a folder that all machines see")
        )
    if chosen is None:
        chosen = CollectiveSettings(host=driver_of(hosts))
    elif (host := getattr(chosen, "host", "")) and _is_loopback(host):  # the address on which the trainer listens
        count_as_read(chosen)
        chosen = chosen.model_copy(update={"host": driver_of(hosts)})
    return config.model_copy(update={"transport": chosen})


def _is_loopback(host: str) -> bool:
    """Return whether the address is a loopback address, which other machines cannot use."""
    try:
        return ipaddress.ip_address(host if ":" in host else gethostbyname(host)).is_loopback
    except (ValueError, gaierror):
        return False  # `make_sender` reports it


__all__ = ["hosts_of", "reaching"]
