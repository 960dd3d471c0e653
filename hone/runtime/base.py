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


class RankLost(RuntimeError):
    """A collective did not end, because another rank did; the message names who waited, and for what."""


class Stalled(RuntimeError):
    """Nothing moved on for longer than `runtime.stall_timeout_s`; what every thread was doing has been printed."""


class WorkerFailed(RuntimeError):
    """A method of a worker raised; the message names the role, the rank and the method."""
