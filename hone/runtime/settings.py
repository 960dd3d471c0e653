"""Settings of the runtime: where workers run."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Annotated

from pydantic import PrivateAttr, model_validator

from hone.config import Choice, Config, FromRegistry, count_as_read, setting
from hone.runtime import RUNTIMES


class PoolSettings(Config):
    """Devices that only the named roles use."""

    devices: int = setting(1, "ranks on each node, one for each device; on CPUs, one process each", ge=1)
    nodes: int = setting(1, "machines of the cluster that ranks are placed on", ge=1)
    roles: list[str] | None = setting(None, "roles that run on it; default: the role with the pool's name")

    _placed: set[str] = PrivateAttr(default_factory=set)

    def members(self, name: str) -> Collection[str]:
        """The roles of the pool `name`. Reading `roles` here does not count as using it; `take` does."""
        roles: list[str] | None = self.__dict__["roles"]
        return [name] if roles is None else roles

    def take(self, name: str, role: str) -> None:
        """Record that `role` runs on this pool. `roles` counts as read once all its roles were taken, so that a role
        that the run does not have stays an error.
        """
        self._placed.add(role)
        if self._placed >= set(self.members(name)):
            count_as_read(self)


class RaySettings(Choice):
    """Ray: one driver, and an actor for each rank."""

    name: str = "ray"
    devices: int = setting(1, "ranks on each node, one for each device; on CPUs, one process each", ge=1)
    nodes: int = setting(1, "machines of the cluster that ranks are placed on", ge=1)
    address: str = setting(
        "", "cluster: host:port, auto (find it on this machine), local (start it here); empty: local if nodes is 1"
    )
    pools: dict[str, PoolSettings] = setting(
        meaning="pool name -> devices for some roles only; all other roles share the run's devices", factory=dict
    )
    start_timeout_s: float = setting(
        120.0, "longest wait for devices, for the start of the ranks, and for room for a rollout server", unit="s", gt=0
    )
    queue_timeout_s: float | None = setting(
        None, "longest wait for devices that other programs of the cluster use; null: start_timeout_s", unit="s", gt=0
    )
    bucket_mib: int = setting(
        256, "size of one bucket of weights from the ranks; two exist at a time", unit="MiB", ge=1
    )

    @model_validator(mode="after")
    def _one_pool_for_a_role(self) -> RaySettings:
        owners: dict[str, str] = {}
        for name, pool in self.pools.items():
            for role in pool.members(name):
                if role in owners:
                    raise ValueError(f"pools {owners[role]} and {name} both name the role {role!r}; remove it from one")
                owners[role] = name
        return self

    def most_here(self, role: str) -> int:
        """Devices that the ranks of `role` and of all pools take together on a machine that holds them all.

        Reading the pools here does not count as using them, see `PoolSettings.take`.
        """
        pools: dict[str, PoolSettings] = self.__dict__["pools"]
        own = any(role in pool.members(name) for name, pool in pools.items())
        devices: list[int] = [pool.__dict__["devices"] for pool in pools.values()]
        return sum(devices) + (0 if own else self.__dict__["devices"])

    def most_ranks(self) -> int:
        """Ranks of the largest pool. Reading the pools here does not count as using them, see `PoolSettings.take`."""
        values = [self.__dict__, *(pool.__dict__ for pool in self.__dict__["pools"].values())]
        counts: list[int] = [one["nodes"] * one["devices"] for one in values]
        return max(counts)


class ServiceRuntime(Choice):
    """Base of runtimes whose service holds the policy. The engine and the rollout of the same name use the service.

    The engine's settings have the same keys. Everything else of the run is computed as with the local runtime.
    """


class RuntimeConfig(Config):
    """Places and limits of workers."""

    backend: Annotated[Choice, FromRegistry(RUNTIMES)] = setting(
        meaning="where workers run: local (this process), ray (a cluster), or the service of a plug-in",
        factory=lambda: Choice(name="local"),
    )
    threads: int = setting(
        0, "CPU threads of a worker; 0: as OMP_NUM_THREADS says, else all cores that this process may use", ge=0
    )
    collective_timeout_s: float = setting(1800.0, "longest wait of one rank for the others", unit="s", gt=0)
    stall_timeout_s: float = setting(
        1800.0,
        "longest time in which no phase, call or answer ends; then the run prints all stacks and ends",
        unit="s",
        gt=0,
    )
    deterministic: bool = setting(False, "use only deterministic GPU kernels: bit-equal resume, but slower")

    def most_ranks(self) -> int:
        """Ranks of the largest pool of a Ray run; without Ray, the processes that torchrun started, or 1."""
        if isinstance(self.backend, RaySettings):
            return self.backend.most_ranks()
        return int(os.environ.get("WORLD_SIZE", "1"))
