"""The local runtime: this process hosts one rank of each role; under torchrun, its peers host the others.

every rank: call(method, batch) --> its part of the batch --> its worker --> results of all ranks, merged

While the first rank leads (`hone.runtime.lead`), its calls are told to the others, which make them too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from hone.data.packing import select
from hone.runtime import ranks
from hone.runtime.base import PhaseFn, Seat
from hone.runtime.lead import enrol, leader
from hone.runtime.settings import RuntimeConfig
from hone.runtime.split import encode, merge, split_groups
from hone.types import Batch

PHASES = {
    "infer_batch": "forward",
    "train_batch": "backward",
    "checkpoint_written": "save_checkpoint",
    **dict.fromkeys(("base_weights", "adapter", "adapter_config"), "weights"),
}
"""What a verb is called in the timings; any other verb goes by its own name."""


class Spread(Protocol):
    """What a worker says of its place among the ranks of its role."""

    @property
    def data_parallel_rank(self) -> int: ...

    @property
    def data_parallel_size(self) -> int: ...

    @property
    def is_output_rank(self) -> bool: ...


class LocalWorkerGroup:
    """Calls its one worker directly; alone, nothing is split and nothing is copied.

    The worker's own exception is the clearest error there is, so it is passed on as it is: the process ends with it,
    and the other ranks' collectives with `RankLost`.
    """

    def __init__(self, role: str, worker: Any, phase: PhaseFn) -> None:
        self.role = role
        self._worker = worker
        self._phase = phase

    @classmethod
    def place(cls, role: str, worker_class: Any, spec: Any, runtime: RuntimeConfig, phase: PhaseFn) -> LocalWorkerGroup:
        """Make this process's worker of a role. Its own errors pass through."""
        group = cls(role, worker_class(spec), phase)
        enrol(group)
        return group

    @classmethod
    def seats(cls, role: str, beside: str, count: int, devices: int, runtime: RuntimeConfig) -> Sequence[Seat]:
        """Servers are started on this machine."""
        return ()

    def call(self, method: str, *arguments: Any) -> Any:
        with self._phase(PHASES.get(method, method)):
            if ranks.ranks() == 1:
                return getattr(self._worker, method)(*arguments)
            lead = leader()
            if lead is None:
                return self._call_all(method, arguments)
            with lead.calling(self.role, method, arguments):
                result = self._call_all(method, arguments)
                return lead.whole(result) if isinstance(result, Iterator) else result

    def _call_all(self, method: str, arguments: tuple[Any, ...]) -> Any:
        with ranks.answered(f"in {method} of role {self.role}"):
            return self._call_part(self._worker, method, arguments)

    def _call_part(self, worker: Spread, method: str, arguments: tuple[Any, ...]) -> Any:
        """Run a method on this rank's part of the batch among its arguments, if there is one."""
        batch = next((one for one in arguments if isinstance(one, Batch)), None)
        parts = split_groups(batch, worker.data_parallel_size) if batch is not None else None
        if parts is not None:
            own = parts[worker.data_parallel_rank]
            arguments = tuple(select(one, own) if isinstance(one, Batch) else one for one in arguments)
        result = getattr(worker, method)(*arguments)
        encoded = encode(result)
        if encoded is None:
            return result
        return merge([one for one in ranks.exchange(encoded if worker.is_output_rank else b"") if one], parts, batch)

    def close(self) -> None:
        close = getattr(self._worker, "close", None)
        if close is not None:
            close()
