"""The interface of a worker group: one call runs on every rank of a role.

Arguments: a `Batch` is split over the data-parallel ranks, balanced by cost; everything else goes to every rank
unchanged. Results: tensors are returned in the order of the batch, `Metrics` are merged by their reducers, and anything
else is taken from the first output rank.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

PhaseFn = Callable[[str], AbstractContextManager[None]]
"""`phase(name)`: times a block under `perf/<name>_s` and shows it as the current phase."""


class WorkerGroup(Protocol):
    """All ranks of one role (actor, critic, reference, rollout)."""

    role: str
    devices: Any  # the same object for roles on the same devices

    def call(self, method: str, *arguments: Any) -> Any:
        """Run `method` of the workers, or of the engines that they host, on every rank.

        An error names role, rank and method, and keeps the cause.
        """

    def close(self) -> None: ...


class Call(Protocol):
    """A running call of a remote actor."""

    def done(self) -> bool:
        """Return whether `answer` will return without waiting."""

    def answer(self) -> Any:
        """The result. Raises ActorLost if the actor or its machine ended, RuntimeError if its object raised."""


class RemoteActor(Protocol):
    """An object in its own process on a machine of the cluster; its methods are coroutines."""

    @property
    def address(self) -> str:
        """The address of its machine in the cluster."""

    def begin(self, method: str, *arguments: Any) -> Call:
        """Start a call of a method without waiting for its result."""

    async def ask(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """Call a method and wait. Raises the errors of `Call.answer`, and TimeoutError."""

    def leave(self) -> None:
        """End the actor's process."""


class ServerDevices(Protocol):
    """The devices of one rollout server, on one machine of the cluster: reserved for it, or shared with ranks."""

    @property
    def is_here(self) -> bool:
        """Return whether the machine is the driver's."""

    @property
    def is_shared(self) -> bool:
        """Return whether ranks of the run use these devices too."""

    @property
    def driver(self) -> str:
        """The address of the driver's machine."""

    async def start_actor(self, hosted: Any, *arguments: Any) -> RemoteActor:
        """Start a process there that creates `hosted(number of accelerators, *arguments)` and sees only these devices.

        The process gets the driver's working folder and variables, as ranks do. Raises ActorLost if no machine has the
        devices free, RuntimeError if the constructor raised.
        """


class ActorLost(RuntimeError):
    """A remote actor or its machine has ended, or no machine could start one."""


class RankLost(RuntimeError):
    """A collective failed because another rank ended; the message names the rank that waited and its call."""


class WorkerFailed(RuntimeError):
    """A method of a worker raised; the message names the role, the rank and the method."""
