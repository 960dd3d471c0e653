"""Settings of where workers run."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

from pydantic import PrivateAttr, model_validator

from hone.config import Choice, Config, FromRegistry, count_as_read, setting
from hone.runtime import RUNTIMES


class PoolSettings(Config):
    """Devices that only some roles use."""

    devices: int = setting(1, "ranks on each node, one for each device; on CPUs, one process each", ge=1)
    nodes: int = setting(1, "machines of the cluster that ranks are placed on", ge=1)
    roles: list[str] | None = setting(None, "who is placed on it; default: the role that bears the pool's name")

    _placed: set[str] = PrivateAttr(default_factory=set)

    def members(self, name: str) -> Collection[str]:
        """The roles of the pool that bears the name; asking is not using: `roles` is used by being placed."""
        roles: list[str] | None = self.__dict__["roles"]
        return [name] if roles is None else roles

    def take(self, name: str, role: str) -> None:
        """Note that a role lies here. What is set counts as used once every role has come: a name that no role of the
        run has stays an error.
        """
        self._placed.add(role)
        if self._placed >= set(self.members(name)):
            count_as_read(self)


class RaySettings(Choice):
    """Ranks as actors of a Ray cluster, called by one driver."""

    name: str = "ray"
    devices: int = setting(1, "ranks on each node, one for each device; on CPUs, one process each", ge=1)
    nodes: int = setting(1, "machines of the cluster that ranks are placed on", ge=1)
    address: str = setting(
        "", "the cluster: host:port, auto (found on this machine), local (started here); empty: local with one node"
    )
    pools: dict[str, PoolSettings] = setting(
        meaning="devices of their own for some roles, by any name; all other roles share the run's", factory=dict
    )
    start_timeout_s: float = setting(
        120.0, "longest wait for devices, for the ranks to start, and for a rollout server's place", unit="s", gt=0
    )
    bucket_mib: int = setting(256, "weights on their way from the ranks at a time; two are held", unit="MiB", ge=1)

    @model_validator(mode="after")
    def _one_pool_for_a_role(self) -> RaySettings:
        owners: dict[str, str] = {}
        for name, pool in self.pools.items():
            for role in pool.members(name):
                if role in owners:
                    raise ValueError(f"pools {owners[role]} and {name} both name the role {role!r}; it can lie on one")
                owners[role] = name
        return self


class RuntimeConfig(Config):
    """Who hosts the workers, and with what."""

    backend: Annotated[Choice, FromRegistry(RUNTIMES)] = setting(
        meaning="what places the workers: local is this process, ray is a cluster", factory=lambda: Choice(name="local")
    )
    threads: int = setting(0, "CPU threads of a worker; 0: all cores that this process may use", ge=0)
    collective_timeout_s: float = setting(1800.0, "longest wait of one rank for the others", unit="s", gt=0)
    stall_timeout_s: float = setting(
        1800.0,
        "longest time without progress: no phase, call or answer ends; then all stacks are shown and the run ends",
        unit="s",
        gt=0,
    )
    deterministic: bool = setting(False, "only deterministic GPU kernels: bit-equal resume at a cost in speed")
