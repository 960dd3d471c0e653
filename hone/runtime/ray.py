"""The Ray runtime: one driver, and an actor for each rank. The cluster itself is in `ray_cluster`.

    driver (trainer, rollout's front, run folder)
      |  ResourcePool: placement group, one RankProcess actor per rank; roles share the run's pool, or have their own
      '- RayWorkerGroup("actor").call("train_batch", batch, loss)
             batch tensors --put once--> object store --views--> rank 0, 1, ...: its part --> worker
             answers of the output ranks <--merged by type--

Every rank gets a call at the same time, and the driver waits with a deadline. If a rank fails or its process is lost,
the error names it. If no rank answers for `stall_timeout_s`, every rank's phase and Python stack are printed first.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hone.config import ConfigError
from hone.models.errors import ModelError
from hone.platforms.base import PlatformBase, current_platform
from hone.runtime.base import PhaseFn, RankLost, ServerDevices, WorkerFailed
from hone.runtime.batch_plan import Arrays, Distant, Piece, plan, plan_tensors, to_array, to_tensor
from hone.runtime.local import PHASES
from hone.runtime.rank_process import (
    Answer,
    Facts,
    Failure,
    RankPosition,
    RankProcess,
    Setup,
    last_lines,
    note_reads,
    own_logs,
)
from hone.runtime.ray_cluster import (
    ASK_S,
    PoolDevices,
    RankDevices,
    address_of,
    connect,
    nodes_of,
    passed_on,
    reserve,
    reserved_devices,
    shared_devices,
    why_lost,
)
from hone.runtime.settings import RaySettings, RuntimeConfig
from hone.runtime.split import merge_tensors, split_batch, whole_groups_for
from hone.runtime.traces import Traced, own_trace, path_of
from hone.runtime.watchdog import progress
from hone.tracking.base import note
from hone.types import Batch, Metric, ModelOutput, merge_metrics

R = TypeVar("R")

GRACE_S = (
    3.0  # after a rank that only waited for another failed: how long the one that it waited for may take to say so
)
LOOK_S = 1.0  # how often a wait is interrupted to look at the clock
MAKING = "making "
INPUT_ERRORS: Mapping[str, type[Exception]] = {one.__name__: one for one in (ConfigError, ModelError)}
"""Errors of a worker that the user can fix; the driver raises them unchanged."""
MAKING_ERRORS: Mapping[str, type[Exception]] = {**INPUT_ERRORS, "ValueError": ValueError}
"""The same during a worker's construction, where a ValueError is about its settings."""


class _Actor(RankProcess):
    """A rank's process as a Ray actor."""

    def facts(self) -> Facts:
        context = ray.get_runtime_context()
        ids = {kind: tuple(found) for kind, found in context.get_accelerator_ids().items()}
        return Facts(ray.util.get_node_ip_address(), context.get_node_id(), os.getpid(), own_logs(), ids)

    def leave(self, array: np.ndarray) -> Any:
        return ray.put(array)

    def fetch(self, reference: Any) -> np.ndarray:
        found: np.ndarray = ray.get(reference, timeout=self.deadline_s)
        return found


@dataclass(frozen=True, slots=True)
class _Rank:
    """One actor and its facts."""

    actor: Any
    facts: Facts


class ResourcePool:
    """Devices with one process each. Closed when nothing refers to it any more, or when a rank is lost."""

    def __init__(self, shape: PoolDevices, settings: RaySettings, runtime: RuntimeConfig) -> None:
        """Raises ConfigError if the cluster lacks the devices, WorkerFailed if a rank cannot be set up."""
        self.shape = shape
        self.bucket_bytes = settings.bucket_mib * 2**20
        self.broken = ""  # why, once it is
        self._start_s = settings.start_timeout_s
        self._stall_s = runtime.stall_timeout_s
        self.size = shape.nodes * shape.devices
        self._order = threading.Lock()  # every rank must get calls in the same order, because each has collectives
        connect(settings)
        self._ranks: list[_Rank] = []
        platform = current_platform()
        group = reserve(shape, platform, settings)
        bundles = list(nodes_of(group))  # the driver's machine is first: rank 0 hands the weights to the driver
        actors = [self._start(platform, group, bundles[rank // shape.devices]) for rank in range(self.size)]
        self._finalizer = weakref.finalize(self, _end, group, actors)
        self._ranks = [_Rank(actor, Facts("?", "", 0, ())) for actor in actors]
        facts = self.wait([one.actor.facts.remote() for one in self._ranks], "start", "pool", self._start_s)
        self._ranks = [_Rank(actor, one) for actor, one in zip(actors, facts, strict=True)]
        self._join(platform, runtime)

    def _start(self, platform: PlatformBase, group: Any, bundle: int) -> Any:
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": where, "max_restarts": 0}
        options["concurrency_groups"] = {"watch": 1}
        if platform.device != "cpu":
            options |= {"num_gpus": 1} if platform.ray_resource == "GPU" else {"resources": {platform.ray_resource: 1}}
        return ray.remote(**options)(_Actor).remote()

    def _join(self, platform: PlatformBase, runtime: RuntimeConfig) -> None:
        address, port = self._ranks[0].facts.node, 0
        deadline = runtime.collective_timeout_s
        if self.size > 1:
            opened = self._ranks[0].actor.open_store.remote(address, self.size, deadline)
            port = self.wait([opened], "rendezvous", "pool", self._start_s)[0]
        setup = Setup(
            folder=Path.cwd(),
            environment=passed_on(),
            threads=runtime.threads,
            deterministic=runtime.deterministic,
            collective_timeout_s=deadline,
        )
        here = self.shape.devices
        places = [RankPosition(rank, self.size, rank % here, here, 0) for rank in range(self.size)]
        calls = [
            one.actor.join.remote(place, setup, address, port) for one, place in zip(self._ranks, places, strict=True)
        ]
        self.wait(calls, "join", "pool", self._start_s + deadline)

    def devices_of_ranks(self) -> list[RankDevices]:
        """The machine and accelerators of each rank."""
        kind = current_platform().ray_resource
        return [RankDevices(one.facts.node_id, one.facts.accelerators.get(kind, ())) for one in self._ranks]

    # ------------------------------------------------------------------------------------------------------- calls

    def everywhere(self, call: Callable[[int, Any], Any], phase: str, role: str) -> list[Any]:
        """Make one call on every rank, and wait for all. `call(rank, actor)` returns Ray's reference.

        Raises WorkerFailed, naming role, rank, node and phase; the pool is closed then.
        """
        return self.wait(self.submit(call, role), phase, role)

    def submit(self, call: Callable[[int, Any], Any], role: str) -> list[Any]:
        if self.broken:
            raise WorkerFailed(f"{self._who(role)} has no ranks any more: {self.broken}")
        with self._order:
            return [call(rank, one.actor) for rank, one in enumerate(self._ranks)]

    def wait(self, calls: Sequence[Any], phase: str, role: str, timeout_s: float = 0.0) -> list[Any]:
        """The answers of all ranks. `timeout_s`: longest time without an answer, by default `stall_timeout_s`."""
        timeout_s = timeout_s or self._stall_s
        answers: dict[int, Any] = {}
        waiting = {call: rank for rank, call in enumerate(calls)}
        for rank in range(len(calls)):
            self._note(rank, PHASES.get(phase, phase))
        consequence: tuple[int, Failure] | None = None
        deadline = time.monotonic() + timeout_s
        while waiting:
            left = deadline - time.monotonic()
            if left <= 0:
                if consequence is not None:
                    self._fail(role, phase, *consequence, waiting.values())
                self._stalled(role, phase, timeout_s, waiting.values())
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=min(left, LOOK_S))
            progress()  # this wait has its own deadline
            for call in done:
                rank = waiting.pop(call)
                self._note(rank, "")
                answer = self._answer(call, rank, role, phase)
                if isinstance(answer, Failure) and not answer.is_consequence:
                    self._fail(role, phase, rank, answer)
                if isinstance(answer, Failure) and consequence is None:
                    consequence = rank, answer
                    deadline = time.monotonic() + GRACE_S
                elif consequence is None:
                    deadline = time.monotonic() + timeout_s
                answers[rank] = answer
        if consequence is not None:
            self._fail(role, phase, *consequence)
        return [answers[rank] for rank in range(len(calls))]

    def _note(self, rank: int, doing: str) -> None:
        """Show on a timeline what a rank does until its answer is there; one rank alone has none of its own."""
        if self.size > 1:
            note(f"{self.shape.name or 'trainer'} rank {rank}", doing)

    def _answer(self, call: Any, rank: int, role: str, phase: str) -> Any:
        try:
            return ray.get(call, timeout=self._stall_s)
        except RayActorError as error:
            self._lost(role, phase, rank, error)
        except RayError as error:
            self._fail(role, phase, rank, Failure(type(error).__name__, " ".join(str(error).split()), "", False))

    @contextmanager
    def traced(self, chosen: frozenset[int], stem: Path, found: Traced) -> Iterator[None]:
        """Trace the ranks in `chosen` during the block. If it raises, they drop their traces, and nothing waits."""
        paths = {rank: path_of(stem, rank, self.shape.name) for rank in sorted(chosen) if rank < self.size}
        try:
            begun = self.everywhere(lambda rank, actor: actor.begin_trace.remote(rank in paths), "begin_trace", "pool")
            yield
        except BaseException:
            with suppress(WorkerFailed, RayError):
                self.submit(lambda _, actor: actor.end_trace.remote(None), "pool")
            raise
        ended = self.everywhere(lambda rank, actor: actor.end_trace.remote(paths.get(rank)), "end_trace", "pool")
        for rank, path in paths.items():
            problem = begun[rank] or ended[rank]
            if problem:
                found.problems.append(f"no trace {path} from {self._where(rank)}: {problem}")
            else:
                found.files.append(path)

    # ------------------------------------------------------------------------------------------------------ failing

    def _who(self, role: str) -> str:
        return f"role {role}{self.shape.remark}"

    def _where(self, rank: int) -> str:
        facts = self._ranks[rank].facts
        return f"rank {rank} of {self.size} on node {facts.node} (process {facts.process})"

    def _lost(self, role: str, phase: str, rank: int, error: RayActorError) -> NoReturn:
        self._show_log(rank)
        reason = why_lost(error)
        self._break(f"{self._who(role)}: {self._where(rank)} was lost in phase {phase}: {reason}", error)

    def _fail(self, role: str, phase: str, rank: int, failure: Failure, waiting: Sequence[int] | Any = ()) -> NoReturn:
        if failure.kind in (MAKING_ERRORS if phase.startswith(MAKING) else INPUT_ERRORS):
            self.close()
            raise MAKING_ERRORS[failure.kind](failure.message)
        self._show_log(rank)
        if waiting:
            self._show_stacks(waiting)
        self._break(
            f"{self._who(role)}: {self._where(rank)} failed in phase {phase}: {failure.kind}: {failure.message}",
            RankLost(failure.trace) if failure.is_consequence else RuntimeError(failure.trace),
        )

    def _stalled(self, role: str, phase: str, timeout_s: float, waiting: Sequence[int] | Any) -> NoReturn:
        silent = sorted(waiting)
        self._show_stacks(range(self.size))
        key = "stall_timeout_s" if timeout_s == self._stall_s else "backend.start_timeout_s"
        self._break(
            f"{self._who(role)}: no progress in phase {phase} for runtime.{key}={timeout_s:g}; "
            f"waiting for {'; '.join(self._where(rank) for rank in silent)}",
            None,
        )

    def _break(self, reason: str, cause: BaseException | None) -> NoReturn:
        """End every rank, because the others may be waiting for the one that failed."""
        self.broken = reason
        self.close()
        raise WorkerFailed(reason) from cause

    def close(self) -> None:
        """End every rank's process and release the devices. May be called again."""
        self.broken = self.broken or "its pool was closed"
        self._finalizer()

    def _show_log(self, rank: int) -> None:
        facts = self._ranks[rank].facts
        lines = _on_node(facts.node_id, lambda: last_lines(facts.logs))
        none = "(its machine does not answer)" if lines is None else "(it wrote none)"
        _say(f"last lines of the log of {self._where(rank)}:", lines or [none])

    def _show_stacks(self, waiting: Sequence[int] | Any) -> None:
        for rank in sorted(waiting):
            watch = self._ranks[rank].actor.doing.options(concurrency_group="watch")
            try:
                phase, seconds, stack = ray.get(watch.remote(), timeout=ASK_S)
            except (GetTimeoutError, RayError) as error:
                _say(f"{self._where(rank)} does not answer ({type(error).__name__})", [])
                continue
            _say(f"{self._where(rank)}: {phase} for {seconds:.0f} s", stack.splitlines())


def _end(group: Any, actors: Sequence[Any]) -> None:
    if not ray.is_initialized():
        return
    for actor in actors:
        ray.kill(actor)
    remove_placement_group(group)


def _on_node(node_id: str, work: Callable[[], R]) -> R | None:
    """Run `work` on another machine of the cluster; None if that machine does not answer."""
    if node_id in ("", ray.get_runtime_context().get_node_id()):
        return work()
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    remote = ray.remote(lambda: work()).options(num_cpus=0, scheduling_strategy=there, max_retries=0)
    try:
        result: R = ray.get(remote.remote(), timeout=2 * ASK_S)
    except (GetTimeoutError, RayError):
        return None
    return result


def _say(headline: str, lines: Sequence[str]) -> None:
    sys.stderr.write("\n".join([headline, *(f"    {line}" for line in lines), ""]))
    sys.stderr.flush()


_pools: weakref.WeakValueDictionary[tuple[Any, ...], ResourcePool] = weakref.WeakValueDictionary()


def _pool(role: str, runtime: RuntimeConfig) -> ResourcePool:
    """The pool of a role: one that names it, else the run's; pools of equal settings are one."""
    settings = runtime.backend
    assert isinstance(settings, RaySettings)
    shape = _shape(role, settings)
    key = _key(shape, settings, runtime)
    pool = _pools.get(key)
    if pool is None or pool.broken:
        pool = _pools[key] = ResourcePool(shape, settings, runtime)
    return pool


def _key(shape: PoolDevices, settings: RaySettings, runtime: RuntimeConfig) -> tuple[Any, ...]:
    """All that a pool is made from."""
    return (
        (shape, settings.address, settings.start_timeout_s, settings.bucket_mib),
        (runtime.threads, runtime.deterministic, runtime.collective_timeout_s, runtime.stall_timeout_s),
        str(Path.cwd()),
    )


def _open_pools(runtime: RuntimeConfig) -> list[ResourcePool]:
    """The pools with ranks that the run has placed roles on."""
    settings = runtime.backend
    assert isinstance(settings, RaySettings)
    shapes = [PoolDevices("", settings.nodes, settings.devices)]
    shapes += [PoolDevices(name, own.nodes, own.devices) for name, own in settings.pools.items()]
    found = [_pools.get(_key(shape, settings, runtime)) for shape in shapes]
    return [pool for pool in found if pool is not None and not pool.broken]


def _shape(role: str, settings: RaySettings) -> PoolDevices:
    for name, own in settings.pools.items():
        if role in own.members(name):
            own.take(name, role)
            return PoolDevices(name, own.nodes, own.devices)
    return PoolDevices("", settings.nodes, settings.devices)


class Shelf:
    """Tensors in Ray's object store; each is put there once and kept while the driver holds it."""

    def __init__(self) -> None:
        self._placed: Any = WeakTensorKeyDictionary()

    def put(self, tensor: Tensor) -> tuple[Any, str]:
        """(reference to the array, torch's name of the dtype)."""
        if tensor not in self._placed:
            array, dtype = to_array(tensor)
            self._placed[tensor] = ray.put(array), dtype
        found: tuple[Any, str] = self._placed[tensor]
        return found


_shelf = Shelf()


class RayWorkerGroup:
    """The ranks of one role, each a Ray actor. See `hone.runtime.base.WorkerGroup`."""

    def __init__(
        self, role: str, pool: ResourcePool, shape: tuple[int, float | None], spec: Any, phase: PhaseFn
    ) -> None:
        """`shape` is the data-parallel size and the length at which attention costs as much as everything else."""
        self.role = role
        self.devices = self._pool = pool
        self._parts, self._equal_cost_length = shape
        self._spec = spec
        self._phase = phase

    @classmethod
    def place(cls, role: str, worker_class: Any, spec: Any, runtime: RuntimeConfig, phase: PhaseFn) -> RayWorkerGroup:
        """Create the workers of a role on its pool.

        Raises the worker's own ConfigError, ModelError or ValueError; WorkerFailed for anything else.
        """
        pool = _pool(role, runtime)
        seed = torch.initial_seed()
        made = pool.everywhere(
            lambda _, actor: actor.place.remote(role, worker_class, spec, seed), f"{MAKING}{role}", role
        )
        return cls(role, pool, made[0][1:], spec, phase)

    @classmethod
    def server_devices(
        cls, role: str, colocated_with: str, count: int, devices: int, runtime: RuntimeConfig
    ) -> Sequence[Sequence[ServerDevices]]:
        """Return the devices of a role's servers: those of the pool that names it, else those of `colocated_with`.

        Of each server, the devices on each of its machines.

        None, if these are all on the driver's machine: then servers are started there. Raises ConfigError.
        """
        settings = runtime.backend
        assert isinstance(settings, RaySettings)
        shape = _shape(role, settings)
        if shape.name:
            return reserved_devices(shape, settings, count, devices)
        if address_of(settings) == "local":
            return ()
        pool = _pool(colocated_with, runtime)
        owned, here = pool.devices_of_ranks(), ray.get_runtime_context().get_node_id()
        if all(one.node == here for one in owned):
            return ()
        return shared_devices(pool, owned, settings.start_timeout_s, count, devices)

    @classmethod
    @contextmanager
    def traced(cls, runtime: RuntimeConfig, chosen: frozenset[int], stem: Path) -> Iterator[Traced]:
        """Trace the driver during the block, and the ranks of each pool that are in `chosen`."""
        found = Traced()
        with ExitStack() as traces:
            for pool in _open_pools(runtime):
                traces.enter_context(pool.traced(chosen, stem, found))
            traces.enter_context(own_trace(stem.with_name(f"{stem.name}.json"), found))
            yield found

    def call(self, method: str, *arguments: Any) -> Any:
        with self._phase(PHASES.get(method, method)):
            batch = next((one for one in arguments if isinstance(one, Batch)), None)
            parts = self._split(batch, whole_groups_for(arguments))
            planned, references = self._plan(arguments, parts)
            answers: list[Answer] = self._pool.everywhere(
                lambda _, actor: actor.run.remote(self.role, method, planned, *references), method, self.role
            )
            if method == "initialize":
                self._note_reads()
        if answers[0].is_stream:
            return self._stream()
        return _merge([answer for answer in answers if answer.of_output_rank], parts, batch)

    def _split(self, batch: Batch | None, whole_groups: bool) -> list[list[int]] | None:
        if batch is None:
            return None
        return split_batch(batch, self._parts, whole_groups, self._equal_cost_length)

    def _plan(self, arguments: tuple[Any, ...], parts: list[list[int]] | None) -> tuple[tuple[Any, ...], list[Any]]:
        """The arguments with each batch and each dict of tensors replaced by its plan, and references to the arrays."""
        planned: list[Any] = []
        references: list[Any] = []
        for one in arguments:
            if isinstance(one, Batch):
                assert parts is not None
                one, needed = plan(one, parts, _shelf.put)
                references += needed
            elif isinstance(one, dict) and all(isinstance(value, Tensor) for value in one.values()):
                one, needed = plan_tensors(one, _shelf.put)
                references += needed
            planned.append(one)
        return tuple(planned), references

    def _stream(self) -> Iterator[tuple[str, Tensor]]:
        """The pairs of a stream that is open on every rank; one bucket is on its way while another is used."""
        most = self._pool.bucket_bytes
        role = self.role

        def ask() -> list[Any]:
            return self._pool.submit(lambda rank, actor: actor.next_bucket.remote(role, most, rank == 0), role)

        coming = ask()
        while True:
            bucket: Arrays = self._pool.wait(coming, "weights", role)[0]
            if not bucket:
                return
            coming = ask()
            yield from ((name, to_tensor(array, dtype)) for name, (array, dtype) in bucket.items())

    def _note_reads(self) -> None:
        note_reads(self._spec, self._pool.everywhere(lambda _, a: a.reads.remote(self.role), "reads", self.role)[0])

    def close(self) -> None:
        """Release the pool; its ranks end when no role uses it."""


def _merge(answers: Sequence[Answer], parts: list[list[int]] | None, batch: Batch | None) -> Any:
    first = answers[0]
    if first.tensors is not None:
        decoded = [{name: to_tensor(*one) for name, one in (answer.tensors or {}).items()} for answer in answers]
        output = merge_tensors(decoded, parts, batch)
        return _with_staying(output, answers, parts, batch) if first.staying else output
    if isinstance(first.value, dict) and all(isinstance(value, Metric) for value in first.value.values()):
        return merge_metrics(*(answer.value for answer in answers))
    return first.value


def _with_staying(
    output: ModelOutput, answers: Sequence[Answer], parts: list[list[int]] | None, batch: Batch | None
) -> ModelOutput:
    """The output with a `Distant` for each value that stays with the ranks."""
    assert parts is not None
    assert batch is not None
    found: dict[str, Any] = {}
    for name in answers[0].staying:
        placed = [(*answer.staying[name], tuple(part)) for answer, part in zip(answers, parts, strict=True)]
        pieces = tuple(Piece(reference, dtype, part) for reference, dtype, part in placed)
        found[name.removeprefix("extras.")] = Distant(batch.num_tokens, pieces)
    return replace(output, extras={**output.extras, **found})
