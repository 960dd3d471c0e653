"""The process of one rank under a Ray driver: holds the workers of all roles, runs calls on its part of each batch.

    driver --call(role, method, arguments)--> RankProcess --> its part of each Batch --> worker --> Answer | Failure

All roles of a pool share the same processes, one for each rank, and their process group. This file does not import Ray
(`ray.py` does). Tensors are passed as NumPy arrays, which Ray's object store shares without a copy.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from hone import machine
from hone.config import Config, forget_reads, sections
from hone.platforms.base import current_platform, use_deterministic_kernels
from hone.processes.garbage import collect_rarely
from hone.runtime import ranks
from hone.runtime.base import RankLost
from hone.runtime.batch_plan import STAYING, Arrays, BatchPlan, TensorsPlan, to_array, unpack, unpack_tensors
from hone.runtime.local import method_of
from hone.runtime.split import tensors_of
from hone.runtime.traces import ProcessTrace
from hone.types import ModelOutput

_OWN_LINES = (":job_id:", ":actor_name:", ":task_name:")  # what Ray writes into a process's log for itself


@dataclass(frozen=True, slots=True)
class RankPosition:
    """The number of a rank, among all ranks and on its machine."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    device: int  # index of its device among those that its process sees


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings that every rank gets before its first worker."""

    folder: Path  # the driver's working folder: paths of a run file are relative to it
    environment: Mapping[str, str]
    threads: int
    deterministic: bool
    collective_timeout_s: float


@dataclass(frozen=True, slots=True)
class Facts:
    """The machine, process id and log files of a rank's process."""

    node: str  # address
    node_id: str
    process: int
    logs: tuple[str, ...]  # files that its output goes to, on its node
    accelerators: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # Ray's kind -> names of its devices


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a call on one rank; empty from a rank whose results equal another rank's."""

    tensors: Arrays | None = None
    staying: Mapping[str, tuple[Any, str]] = field(default_factory=dict)  # name -> reference to an array, its dtype
    value: Any = None
    is_stream: bool = False
    of_output_rank: bool = True


@dataclass(frozen=True, slots=True)
class Failure:
    """Error that a call raised on one rank, as text: the driver may not have the library that raised it."""

    kind: str
    message: str
    trace: str
    is_consequence: bool  # it waited for another rank, whose failure is the one to look at


@dataclass(slots=True)
class _Work:
    """Current work of the process; read by another thread."""

    phase: str = "idle"
    since: float = field(default_factory=time.monotonic)
    thread: int = 0


class RankProcess:
    """The workers of one rank."""

    def __init__(self) -> None:
        collect_rarely()  # the workers' classes are imported after this
        self._workers: dict[str, Any] = {}
        self._specs: dict[str, Any] = {}
        self._streams: dict[str, Iterator[tuple[str, Tensor]]] = {}
        self._work = _Work()
        self._trace = ProcessTrace()
        self._store: dist.TCPStore | None = None
        self.deadline_s = 0.0  # longest wait for what another rank gives

    # ------------------------------------------------------------------------------------------------------ set-up

    def open_store(self, address: str, count: int, timeout_s: float) -> int:
        """Open the store through which ranks find each other, on one address only; returns the port."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as listener:
            listener.bind((address, 0))
            listener.listen()
            port: int = listener.getsockname()[1]
            deadline = timedelta(seconds=timeout_s)
            descriptor = os.dup(listener.fileno())
            self._store = dist.TCPStore(
                address, port, count, True, deadline, wait_for_workers=False, master_listen_fd=descriptor
            )
        return port

    def join(self, place: RankPosition, setup: Setup, address: str, port: int) -> Failure | None:
        """Set this process up, and join the process group."""
        try:
            with self._doing("join"):
                self._join(place, setup, address, port)
        except Exception as error:  # noqa: BLE001  whatever it is, the driver says it and ends the run
            return _failure(error)
        return None

    def _join(self, place: RankPosition, setup: Setup, address: str, port: int) -> None:
        if not setup.folder.is_dir():
            raise FileNotFoundError(f"{setup.folder} is not on {socket.gethostname()}: all ranks have to see the run")
        os.chdir(setup.folder)
        self.deadline_s = setup.collective_timeout_s
        os.environ.update(setup.environment)
        own = {"RANK": place.rank, "WORLD_SIZE": place.ranks, "LOCAL_WORLD_SIZE": place.local_ranks}
        os.environ.update({name: str(value) for name, value in own.items()})
        os.environ["LOCAL_RANK"] = str(place.local_rank)
        platform = current_platform()
        if platform.device != "cpu":
            platform.set_device(place.device)
        torch.set_num_threads(setup.threads or max(1, machine.cores() // place.local_ranks))
        if setup.deterministic:
            use_deterministic_kernels()
        if place.ranks > 1:
            if address.startswith("127."):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            deadline = timedelta(seconds=setup.collective_timeout_s)
            store = self._store or dist.TCPStore(address, port, place.ranks, False, deadline)
            dist.init_process_group(
                platform.collectives(), store=store, rank=place.rank, world_size=place.ranks, timeout=deadline
            )

    def place(self, role: str, worker_class: Any, spec: Any, seed: int) -> Failure | tuple[int, int, float | None]:
        """Make the worker of a role; returns its data-parallel rank and size, and its `equal_cost_length`.

        An earlier worker of the role is replaced.

        `seed` is the driver's, so random numbers are the same on all ranks and in all launches.
        """
        for config in _configs(spec):
            forget_reads(config)
        self._workers.pop(role, None)
        try:
            with self._doing(f"making {role}"):
                current_platform().seed(seed)
                self._workers[role] = worker = worker_class(spec)
        except Exception as error:  # noqa: BLE001  see `join`
            return _failure(error)
        self._specs[role] = spec
        return worker.data_parallel_rank, worker.data_parallel_size, getattr(worker, "equal_cost_length", None)

    def reads(self, role: str) -> list[dict[str, list[str]]]:
        """The keys that the worker has read, by section, for each settings object of the role's spec."""
        return [
            {section.prefix: sorted(section.config._reads) for section in sections(config)}
            for config in _configs(self._specs[role])
        ]

    # ------------------------------------------------------------------------------------------------------- calls

    def run(self, role: str, method: str, arguments: tuple[Any, ...], *arrays: np.ndarray) -> Answer | Failure:
        """Call a method of a worker with its part of each batch; `arrays` are the arguments' tensors."""
        try:
            with self._labelled(f"{method} of {role}"), ranks.answered(f"in {method} of role {role}"):
                worker = self._workers[role]
                left = iter(arrays)
                own = [self._own(one, worker, left) for one in arguments]
                return self._answer(role, method_of(worker, method)(*own))
        except Exception as error:  # noqa: BLE001  see `join`
            return _failure(error)

    def _own(self, argument: Any, worker: Any, arrays: Iterator[np.ndarray]) -> Any:
        """Convert one argument of a call to what the worker gets."""
        if isinstance(argument, BatchPlan):
            return unpack(argument, arrays, worker.data_parallel_rank, self.fetch)
        return unpack_tensors(argument, arrays) if isinstance(argument, TensorsPlan) else argument

    def _answer(self, role: str, result: Any) -> Answer:
        if isinstance(result, Iterator):
            self._streams[role] = result
            return Answer(is_stream=True)
        if not self._workers[role].is_output_rank:
            return Answer(of_output_rank=False)
        if isinstance(result, ModelOutput):
            arrays = {name: to_array(tensor) for name, tensor in tensors_of(result).items()}
            staying = {name: arrays.pop(name) for name in [f"extras.{one}" for one in STAYING] if name in arrays}
            return Answer(arrays, staying={name: (self.leave(one), dtype) for name, (one, dtype) in staying.items()})
        return Answer(value=result)

    def next_bucket(self, role: str, most_bytes: int, is_wanted: bool) -> Arrays | Failure:
        """The next tensors of the stream that the role's last call opened, about `most_bytes`; empty after the last.

        Every rank has to call this, because gathering a tensor is a collective; only the wanted rank returns them.
        """
        found: Arrays = {}
        size = 0
        try:
            with self._labelled(f"stream of {role}"), ranks.answered(f"in the stream of role {role}"):
                for name, tensor in self._streams[role]:
                    size += tensor.nbytes
                    if is_wanted:
                        found[name] = to_array(tensor)
                    if size >= most_bytes:
                        break
        except Exception as error:  # noqa: BLE001  see `join`
            return _failure(error)
        return found

    def leave(self, array: np.ndarray) -> Any:
        """Keep an array for other ranks; returns the reference for `fetch`. `ray.py` overrides both."""
        return array

    def fetch(self, reference: Any) -> np.ndarray:
        found: np.ndarray = reference
        return found

    # ------------------------------------------------------------------------------------------------------ traces

    def begin_trace(self, is_wanted: bool) -> str:
        """Begin to record this process, if it is wanted; see `ProcessTrace.begin`."""
        with self._doing("begin_trace"):
            return self._trace.begin() if is_wanted else ""

    def end_trace(self, path: Path | None) -> str:
        """Write what was recorded, or drop it; see `ProcessTrace.end`."""
        with self._doing("end_trace"):
            return self._trace.end(path)

    @contextmanager
    def _labelled(self, phase: str) -> Iterator[None]:
        """Record what the process does, and show it in a trace as a block around its operators."""
        with self._doing(phase), record_function(phase):
            yield

    # ---------------------------------------------------------------------------------------------------- liveness

    def doing(self) -> tuple[str, float, str]:
        """(phase, seconds since it began, Python stack) of the working thread; called from another thread."""
        frame = sys._current_frames().get(self._work.thread)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        return self._work.phase, time.monotonic() - self._work.since, stack

    def _doing(self, phase: str) -> _Busy:
        return _Busy(self._work, phase)


class _Busy:
    """Records what the process does, and flushes what the block printed."""

    def __init__(self, work: _Work, phase: str) -> None:
        self._work = work
        self._phase = phase

    def __enter__(self) -> None:
        self._work.phase, self._work.since = self._phase, time.monotonic()
        self._work.thread = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._work.phase, self._work.since = f"idle after {self._phase}", time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()


def _failure(error: Exception) -> Failure:
    text = " ".join(str(error).split())
    return Failure(type(error).__name__, text, traceback.format_exc(), isinstance(error, RankLost))


def _configs(spec: Any) -> list[Config]:
    values = [getattr(spec, one.name) for one in fields(spec)] if is_dataclass(spec) else [spec]
    return [value for value in values if isinstance(value, Config)]


def note_reads(spec: Any, reads: Sequence[Mapping[str, Sequence[str]]]) -> None:
    """Mark the settings as read that a worker in another process has read."""
    for config, keys in zip(_configs(spec), reads, strict=True):
        for section in sections(config):
            for name in keys[section.prefix]:
                getattr(section.config, name)


def last_lines(logs: Sequence[str], count: int = 20) -> list[str]:
    """The last lines of a process's log files on this machine."""
    found: list[str] = []
    for path in map(Path, logs):
        if path.is_file():
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - 65536))
                lines = file.read().decode("utf-8", errors="replace").splitlines()
            found += [line for line in lines if line.strip() and not line.startswith(_OWN_LINES)][-count:]
    return found


def own_logs() -> tuple[str, ...]:
    """The files that this process's stdout and stderr go to, where the system tells."""
    places = [Path(f"/proc/self/fd/{number}") for number in (1, 2)]
    return tuple(dict.fromkeys(os.readlink(place) for place in places if place.exists()))
