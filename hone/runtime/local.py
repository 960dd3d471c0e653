"""The local runtime: this process hosts one rank of each role; under torchrun, its peers host the others.

every rank: call(method, batch) --> its part of the batch --> its worker --> results of all ranks, merged
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from torch.profiler import record_function

from hone.data.packing import select
from hone.runtime import ranks
from hone.runtime.base import PhaseFn, ServerDevices
from hone.runtime.settings import RuntimeConfig
from hone.runtime.split import encode, merge, split_batch, whole_groups_for
from hone.runtime.traces import Traced, own_trace, path_of
from hone.types import Batch

PHASES = {
    "infer_batch": "forward",
    "train_batch": "backward",
    "checkpoint_written": "save_checkpoint",
    **dict.fromkeys(("stream", "adapter_config", "send_weights"), "weights"),
}
"""Method -> its name in the timings; other methods keep their name."""


class Spread(Protocol):
    """A worker's position among the ranks of its role."""

    @property
    def data_parallel_rank(self) -> int: ...

    @property
    def data_parallel_size(self) -> int: ...

    @property
    def is_output_rank(self) -> bool: ...


def method_of(worker: Any, name: str) -> Callable[..., Any]:
    """A method of a worker, or else of the engine that it hosts. Raises AttributeError."""
    found: Callable[..., Any] = getattr(worker if hasattr(worker, name) else worker.engine, name)
    return found


class LocalWorkerGroup:
    """The ranks are this process, or the processes that torchrun started. With one rank, nothing is split or copied.

    An exception of the worker is passed on unchanged, because it is the clearest error. This process ends with it, and
    the other ranks' collectives raise `RankLost`.
    """

    def __init__(self, role: str, worker: Any, phase: PhaseFn) -> None:
        self.role = role
        self.devices = None  # every role is on the device of its rank
        self._worker = worker
        self._phase = phase
        self._alone = ranks.ranks() == 1

    @classmethod
    def place(cls, role: str, worker_class: Any, spec: Any, runtime: RuntimeConfig, phase: PhaseFn) -> LocalWorkerGroup:
        """Create this process's worker of a role. Its errors pass through."""
        return cls(role, worker_class(spec), phase)

    @classmethod
    def server_devices(
        cls, role: str, colocated_with: str, count: int, devices: int, runtime: RuntimeConfig
    ) -> Sequence[Sequence[ServerDevices]]:
        """None: servers are started on this machine."""
        return ()

    @classmethod
    @contextmanager
    def traced(cls, runtime: RuntimeConfig, chosen: frozenset[int], stem: Path) -> Iterator[Traced]:
        """Trace this process during the block, if its rank is one of `chosen`. Nothing waits for another rank."""
        found, rank = Traced(), ranks.rank()
        if rank not in chosen:
            yield found
            return
        with own_trace(stem.with_name(f"{stem.name}.json") if ranks.ranks() == 1 else path_of(stem, rank), found):
            yield found

    def call(self, method: str, *arguments: Any) -> Any:
        with self._phase(PHASES.get(method, method)), record_function(f"{method} of {self.role}"):
            if self._alone:
                return method_of(self._worker, method)(*arguments)
            with ranks.answered(f"in {method} of role {self.role}"):
                return self._call_part(self._worker, method, arguments)

    def _call_part(self, worker: Spread, method: str, arguments: tuple[Any, ...]) -> Any:
        """Run a method on this rank's part of the batch among its arguments, if there is one."""
        batch = next((one for one in arguments if isinstance(one, Batch)), None)
        parts = None
        if batch is not None:
            length = getattr(worker, "equal_cost_length", None)
            parts = split_batch(batch, worker.data_parallel_size, whole_groups_for(arguments), length)
            own = parts[worker.data_parallel_rank]
            arguments = tuple(select(one, own) if isinstance(one, Batch) else one for one in arguments)
        result = method_of(worker, method)(*arguments)
        encoded = encode(result)
        if encoded is None:
            return result
        return merge([one for one in ranks.exchange(encoded if worker.is_output_rank else b"") if one], parts, batch)

    def close(self) -> None:
        close = getattr(self._worker, "close", None)
        if close is not None:
            close()
