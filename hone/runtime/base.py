"""The contract of a worker group: one call, made on every rank of a role.

One rule for arguments: a `Batch` is split over the data-parallel ranks, balanced by tokens; everything else goes to
every rank as it is. One rule for results: tensors come back in the batch's own order, `Metrics` are merged by their
reducers, anything else is taken from the first output rank.
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

    def call(self, method: str, *arguments: Any) -> Any:
        """Run `method` on every rank; a failure names role, rank and method, and keeps the cause."""

    def close(self) -> None: ...


class Call(Protocol):
    """A question to a guest that is on its way."""

    def done(self) -> bool:
        """Whether `answer` has something to say; asking takes no time."""

    def answer(self) -> Any:
        """The answer. Raises GuestLost if guest or machine has ended, RuntimeError for what the guest raised."""


class Guest(Protocol):
    """An object in a process of its own on some machine of the cluster; all its methods are coroutines."""

    @property
    def address(self) -> str:
        """Its machine's, in the cluster."""

    def begin(self, method: str, *arguments: Any) -> Call:
        """Call a method, and wait for nothing."""

    async def ask(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """Call a method; raises as `Call.answer` does, and TimeoutError."""

    def leave(self) -> None:
        """End its process."""


class Seat(Protocol):
    """Devices on one machine of the cluster that a server may use: reserved for it, or shared with ranks."""

    @property
    def is_here(self) -> bool:
        """Whether the machine is the driver's."""

    @property
    def is_shared(self) -> bool:
        """Whether ranks of the run use these devices too."""

    @property
    def driver(self) -> str:
        """The address of the driver's machine."""

    async def open(self, guest: Any, *arguments: Any) -> Guest:
        """Start a process there that hosts a `guest(number of accelerators, *arguments)`, and sees only those.

        The process gets the driver's working folder and variables as ranks do. Raises GuestLost if there is no room
        (any more), RuntimeError for what the guest raised.
        """


class GuestLost(RuntimeError):
    """A guest, or the machine it was on, has ended; or there is none that could be one."""


class RankLost(RuntimeError):
    """A collective did not end, because another rank did; the message names who waited, and for what."""


class Stalled(RuntimeError):
    """Nothing moved on for longer than `runtime.stall_timeout_s`; what every thread was doing has been printed."""


class WorkerFailed(RuntimeError):
    """A method of a worker raised; the message names the role, the rank and the method."""
