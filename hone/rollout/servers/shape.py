"""The ranks of one server (`ServerRanks`), and its machines if it uses several (`ServerMachines`).

Each rank needs a device, and receives weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hone.config import ConfigError
from hone.rollout import ROLLOUT_ENGINES
from hone.rollout.settings import RolloutConfig


@dataclass(frozen=True, slots=True)
class ServerRanks:
    """The ranks of a server: tensor x pipeline x data."""

    tensor: int
    pipeline: int = 1
    data: int = 1

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data

    def __str__(self) -> str:
        """In the words of a run file."""
        sizes = {"pipeline parallel size": self.pipeline, "data parallel size": self.data}
        others = [f"{name} = {size}" for name, size in sizes.items() if size > 1]
        return " x ".join([f"rollout.tensor_parallel = {self.tensor}", *others])


ShapeFn = Callable[[RolloutConfig], ServerRanks]


@dataclass(frozen=True, slots=True)
class ServerMachines:
    """The machines of a server that uses several: the first answers requests, the others only compute."""

    addresses: tuple[str, ...]  # in the cluster
    number: int  # of this machine
    port: int  # free on the first machine, for the ranks to meet

    @property
    def is_first(self) -> bool:
        return self.number == 0


def shape_of(settings: RolloutConfig) -> ServerRanks:
    """The ranks of one server with these settings. Raises ConfigError for sizes that are none."""
    adapter = ROLLOUT_ENGINES.get(settings.backend)
    find: ShapeFn | None = getattr(adapter, "shape_of", None)
    return ServerRanks(settings.tensor_parallel) if find is None else find(settings)


def size_option(engine: Mapping[str, Any], *names: str) -> int:
    """The option of `rollout.engine` that has one of these names; 1 if none is set.

    Raises ConfigError unless it is a whole number above 0.
    """
    for name, value in engine.items():
        if name.replace("-", "_") in names and value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"rollout.engine.{name} should be a whole number above 0, found {value!r}")
            return value
    return 1


__all__ = ["ServerMachines", "ServerRanks", "shape_of", "size_option"]
