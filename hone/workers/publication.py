"""The trainer's interface to the rollout: generation for episodes, and publication of weights.

    RolloutHandle --generate--> engine or router
                  --sync_from(actor)--> Publisher: LocalPublisher copies inside this process,
                                                   ServerPublisher sends through a transport of `hone.weights`

    whole weights      every sync: Full
    a LoRA adapter     to a replica that does not hold the base yet: Full (the base), then Adapter; else Adapter alone

Engines of `rollout` and transports of `weights` meet only here; neither imports the other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from hone.config import ConfigError
from hone.rollout.adapters import AdapterKind
from hone.rollout.base import RolloutEngine, ServerAdapter
from hone.rollout.lending import LentServer
from hone.rollout.router import Router
from hone.runtime.base import PhaseFn
from hone.runtime.watchdog import progress
from hone.types import Completion, GenerationRequest, Metric, Metrics, Versions, merge_metrics
from hone.weights.base import Adapter, Full, LoadedWeights, NamedTensors, Payload, WeightSyncError
from hone.weights.in_process import sync
from hone.weights.sender import make_sender
from hone.weights.settings import WeightSyncConfig
from hone.weights.snapshot import Snapshot, Source, StreamFn
from hone.weights.sync import CheckpointEngineManager
from hone.workers.control import Membership, serve_control
from hone.workers.probe import Probe
from hone.workers.snapshots import SnapshotPublication
from hone.workers.train import TrainHandle

R = TypeVar("R")
ADAPTER = "policy"  # name of the policy's own adapter on the servers
WATCH_S = 0.5  # between two looks at whether the receivers of a sync are alive
SPEECHLESS_S = 3.0  # wait after its end for the more exact error of its connection
LENT_S = 10.0  # for the result of a coroutine that has ended
DYING_S = 10.0  # a process may appear alive this long after its sync failed, on a busy machine


class Publisher(Protocol):
    """Brings the trainer's weights to every replica, or raises WeightSyncError."""

    async def send(self, source: Source, version: int) -> Metrics: ...

    async def restore(self, replica: Any, source: Source, version: int) -> None:
        """Bring them to one restarted replica."""

    async def close(self) -> None: ...


class LocalPublisher:
    """Publisher to engines in this process, which copy the trainer's tensors."""

    def __init__(self, engines: Sequence[RolloutEngine], config: WeightSyncConfig) -> None:
        if config.transport is not None:
            raise ConfigError(
                f"weights.transport: {config.transport.name!r} is for servers; the rollout runs in the trainer's "
                "process, where weights are copied"
            )
        self._engines = engines

    async def send(self, source: Source, version: int) -> Metrics:
        metrics: Metrics = {}
        for engine in self._engines:
            metrics = await self._to(engine, source, version)
        return {**metrics, "weights/replicas": Metric.max(len(self._engines))}

    async def restore(self, replica: Any, source: Source, version: int) -> None:
        await self._to(replica, source, version)

    async def _to(self, engine: RolloutEngine, source: Source, version: int) -> Metrics:
        """Load base and adapter together, so that the engine never samples from the base alone."""
        if source.adapter is None:
            return await sync(source.whole(), engine.update_weights, version)
        stream, payload = source.adapter

        async def put(tensors: NamedTensors, version: int) -> LoadedWeights:
            return await engine.update_adapter(tensors, payload.config, version)

        metrics = {} if engine.has_base else await sync(source.whole(), engine.update_weights, version)
        return merge_metrics(metrics, await sync(stream(), put, version))

    async def close(self) -> None:
        return None


class ServerPublisher:
    """Publisher to servers: one transport sends to all, and each proves what it received."""

    def __init__(self, router: Router, config: WeightSyncConfig, token: str) -> None:
        self._router = router
        self._engine = make_sender(config, token)
        self._manager = CheckpointEngineManager(self._engine)
        self._turn: asyncio.Lock | None = None  # one sync at a time: there is one sender

    async def send(self, source: Source, version: int) -> Metrics:
        """Send to every running replica. Those that die or hang meanwhile are restarted; other failures are errors."""
        self._router.look()
        if not self._router.replicas:
            await self._router.revived()
        return await self._to({replica.name: replica for replica in self._router.replicas}, source, version)

    async def send_snapshot(self, snapshot: Snapshot, names: Collection[str]) -> Metrics:
        """Send to these replicas, as `send`; none of them serves weights that changed after they were copied."""
        replicas = {replica.name: replica for replica in self._router.replicas if replica.name in names}
        return await self._to(replicas, snapshot.source(), snapshot.version, snapshot.verify) if replicas else {}

    async def _to(
        self,
        replicas: dict[str, ServerAdapter],
        source: Source,
        version: int,
        verify: Callable[[], None] | None = None,
    ) -> Metrics:
        if not replicas:
            raise WeightSyncError(f"no rollout replica is left to receive weight version {version}")
        async with self._lock:
            for name in [name for name in self._manager.versions if name not in replicas]:
                self._manager.remove_replica(name)
            with self._router.updating(replicas.values()):
                try:
                    return await self._send(source, version, replicas)
                finally:  # also if the sync failed for others
                    if verify is not None:
                        await asyncio.to_thread(verify)
                    self._serve(version, replicas)

    def _serve(self, version: int, replicas: Mapping[str, ServerAdapter]) -> None:
        """Give requests to those that proved this version."""
        for name, replica in replicas.items():
            if self._manager.versions.get(name) == replica.weight_version == version:
                self._router.replica_serves(replica)

    async def _send(self, source: Source, version: int, replicas: dict[str, ServerAdapter]) -> Metrics:
        if source.adapter is None:
            return await self._sync(source.whole, version, replicas, Full())
        stream, payload = source.adapter
        without = {name: one for name, one in replicas.items() if not one.has_base}
        metrics: Metrics = {}
        if without:
            metrics = await self._sync(source.whole, version, without, Full(), resume=False)
        # dead replicas are being restarted; `restore` sends them both
        left = {name: one for name, one in replicas.items() if one.alive and one.has_base}
        if not left:
            return metrics
        return merge_metrics(metrics, await self._sync(stream, version, left, payload))

    async def restore(self, replica: ServerAdapter, source: Source, version: int) -> None:
        async with self._lock:
            self._manager.remove_replica(replica.name)
            self._manager.add_replica(replica)
            only = [replica.name]
            await self._manager.sync(source.whole(), version, only=only, resume=source.adapter is None)
            if source.adapter is not None:
                stream, payload = source.adapter
                await self._manager.sync(stream(), version, payload, only)

    async def _sync(
        self,
        stream: StreamFn,
        version: int,
        replicas: dict[str, ServerAdapter],
        payload: Payload,
        resume: bool = True,
    ) -> Metrics:
        for name, replica in replicas.items():
            if name not in self._manager.versions:
                self._manager.add_replica(replica)
        try:
            async with self._watching(replicas):
                return await self._manager.sync(stream(), version, payload, list(replicas), resume)
        except WeightSyncError as error:
            failed = [replicas[name] for name in error.replicas]
            dead = await _dead(failed, error.silent, enough=1 if self._engine.all_or_none else len(failed))
            if not dead or (len(dead) < len(failed) and not self._engine.all_or_none):
                raise
            for replica in dead:
                self._router.replica_failed(replica, str(error))
            if living := [replica for replica in failed if replica not in dead]:  # the dead one ended their sync
                for replica in living:
                    self._manager.add_replica(replica)
                return await self._manager.sync(stream(), version, payload, [one.name for one in living], resume)
            left = len(replicas) - len(dead)
            return {"weights/version": Metric.max(version), "weights/replicas": Metric.max(left)}

    @asynccontextmanager
    async def _watching(self, replicas: Mapping[str, ServerAdapter]) -> AsyncIterator[None]:
        """Drop replicas that have ended from the sync: if a machine loses its network, its connections stay open."""

        async def watch() -> None:
            ended: dict[str, float] = {}
            while True:
                now = time.monotonic()
                for name, replica in replicas.items():
                    if not replica.alive and now - ended.setdefault(name, now) > SPEECHLESS_S:
                        self._engine.drop(name, "its server or its machine has ended")
                await asyncio.sleep(WATCH_S)

        watching = asyncio.create_task(watch(), name="weight sync: watch")
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    @property
    def _lock(self) -> asyncio.Lock:
        if self._turn is None:
            self._turn = asyncio.Lock()
        return self._turn

    async def close(self) -> None:
        await self._engine.close()


async def _dead(replicas: Sequence[ServerAdapter], silent: Sequence[str], enough: int) -> list[ServerAdapter]:
    """Return the replicas whose process has ended, or hangs and was silent when it was told to stop.

    Waits until `enough` have ended, because connections break before that.
    """
    deadline = time.monotonic() + DYING_S
    while len(dead := [one for one in replicas if not one.alive or one.name in silent]) < enough:
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(0.05)
    return dead


# ------------------------------------------------------------------------------------------------- the rollout's handle


@dataclass(frozen=True, slots=True)
class AdapterRule:
    """When a policy's LoRA adapter is sent without its base, after the base was sent once."""

    unfit: Callable[[AdapterKind], str]  # why the rollout cannot serve it; empty if it can
    required: bool  # an unsupported adapter is an error instead of being merged
    model: str  # transformers' `model_type` of the policy


@dataclass(frozen=True, slots=True)
class Background:
    """Parts with which a rollout receives weights while training goes on."""

    timeout_s: float  # deadline of a publication that is waited for
    another: Callable[[], ServerAdapter]  # makes one more server
    control: Path  # folder of requests to join and to leave
    lent: LentServer | None = None  # on the trainer's device


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """Memory that the rollout servers take of each device that they share with the trainer, while they are awake."""

    fraction: float  # of its memory, for one server
    servers: int  # on one device
    key: str  # of the fraction in run files


@dataclass(frozen=True, slots=True)
class RolloutParts:
    """Parts of a rollout (`workers.rollout` builds it)."""

    engine: RolloutEngine | Router
    dtype: torch.dtype  # of its weights
    in_files: bool  # whether it loads weights in the layout of the model's files: every expert by itself
    publisher: Publisher
    sleep_level: int = 0  # what it frees while the policy is trained; 0: nothing
    probe: Probe | None = None  # compares log-probs of both sides after each sync
    adapter: AdapterRule | None = None  # None: adapters are merged into the weights
    background: Background | None = None  # None: weights are sent between steps, while training waits
    start: Callable[[], Coroutine[Any, Any, None]] | None = None  # starts its servers; None: it has none
    share: DeviceShare | None = None  # of the trainer's device; None: none, or not known


class RunFn(Protocol):
    """Run one coroutine to its end, on the event loop of the run."""

    def __call__(self, coroutine: Coroutine[Any, Any, R], /) -> R: ...


class Loop(Protocol):
    """The event loop of a run."""

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Run one coroutine to its end."""

    def start(self, coroutine: Coroutine[Any, Any, R]) -> Future[R]:
        """Run one while the caller goes on."""


class RolloutHandle:
    """The rollout role: generates for episodes and receives weights, once `start` has started its servers.

    Synchronous: `sync_from` sends the actor's live weights while nothing else happens. Asynchronous: `publish` copies
    them, and `SnapshotPublication` sends the copy while generation and training go on.
    """

    def __init__(self, parts: RolloutParts, loop: Loop, phase: PhaseFn) -> None:
        self._parts = parts
        self._engine = parts.engine
        self._loop = loop
        self._run: RunFn = loop.run
        self._phase = phase
        self._actor: TrainHandle | None = None  # whose weights are served
        self._actor_updates = 0  # its `updates` when they were sent
        self._version = -1
        self._kept: Metrics = {}  # from before a probe, for the next `metrics` call
        self._asleep = False
        self._begin = parts.start  # None: nothing is left to start
        self._snapshots: SnapshotPublication | None = None
        self._control: Future[None] | None = None
        self._lent: LentServer | None = None if parts.background is None else parts.background.lent
        if parts.background is not None:
            assert isinstance(parts.engine, Router)
            assert isinstance(parts.publisher, ServerPublisher)
            self._snapshots = SnapshotPublication(parts.engine, parts.publisher)
        elif isinstance(parts.engine, Router):
            parts.engine.restore_with(self._restore)

    def start(self) -> None:
        """Start the servers, if they are not running. Raises ServerFailed, with nothing left running."""
        begin, self._begin = self._begin, None
        if begin is None:
            return
        try:
            self._run(begin())
        except BaseException:
            self.close()
            raise
        if self._parts.background is not None:
            assert isinstance(self._engine, Router)
            membership = Membership(self._engine, self._parts.background.another, self._parts.background.timeout_s)
            self._control = self._loop.start(serve_control(self._parts.background.control, membership))

    async def generate(self, request: GenerationRequest) -> Completion:
        """One completion. Raises PromptTooLong where `max_sequence_tokens` leaves no room, and as engines do."""
        if self._snapshots is not None:
            self._snapshots.check()
        completion = await self._engine.generate(request.fitted())
        progress()
        return completion

    async def abort_all(self) -> None:
        """End every request now; each `generate` returns the tokens it has."""
        await self._engine.abort_all()

    @property
    def share(self) -> DeviceShare | None:
        """Return the memory that it takes of the trainer's device; None: nothing, or not known."""
        return self._parts.share

    @property
    def sleeps(self) -> bool:
        """Return whether it frees its memory while the policy is trained."""
        return self._parts.sleep_level > 0

    def make_room(self) -> None:
        """Free the memory that training needs, if rollout and training share a device.

        The rollout generates nothing until the next `sync_from`, which wakes the engine.
        """
        if self._parts.sleep_level and not self._asleep:
            with self._phase("sleep"):
                self._run(self._engine.sleep(self._parts.sleep_level))
            self._asleep = True

    # ------------------------------------------------------------------------------------- while training goes on

    def hold(self, versions: Versions) -> AbstractContextManager[None]:
        """Keep these versions available to one draw until it has ended, between its turns too. On the event loop."""
        return self._asynchronous.hold(versions)

    def keep_while(self, is_needed: Callable[[int], bool]) -> None:
        """Keep the snapshot of each version while `is_needed` says so; it is called on the event loop."""
        self._asynchronous.is_needed = is_needed

    def publish(self, actor: TrainHandle, version: int) -> None:
        """Copy the actor's weights as `version`; they are sent while the caller goes on.

        Raises the error of an earlier publication. Later ones are raised by the next call of this handle.
        """
        snapshots = self._asynchronous
        snapshots.check()
        with self._phase("weight_sync"):
            self._actor, self._version = actor, version
            snapshot = snapshots.copy(self._source(actor), version)
        self._loop.start(snapshots.send(snapshot))

    @contextmanager
    def lending(self) -> Iterator[None]:
        """While the trainer waits: a server on its device serves requests too, if the run has one."""
        if self._lent is None or self._actor is None:
            yield
            return
        self._actor.release_memory()  # the trainer's allocator would keep it from the server
        waking = self._loop.start(self._lent.wake())
        try:
            yield
        finally:
            self._run(self._lent.rest())
        waking.result(LENT_S)  # raises what ended it; `rest` has waited for it

    def wait_for(self, version: int, timeout_s: float) -> None:
        """Wait until every running replica has proven `version` or a newer one. Raises TimeoutError."""
        with self._phase("weight_sync"):
            self._run(self._asynchronous.reached(version, timeout_s))

    @property
    def _asynchronous(self) -> SnapshotPublication:
        if self._snapshots is None:
            raise RuntimeError("this rollout was started without asynchrony: send weights with sync_from")
        return self._snapshots

    # --------------------------------------------------------------------------------------- while training waits

    def sync_from(self, actor: TrainHandle, version: int) -> Metrics:
        """Send the actor's weights as `version`; return when every replica has proved that it serves them."""
        if self._parts.background is not None:
            self.publish(actor, version)
            self.wait_for(version, self._parts.background.timeout_s)
            return {}
        with self._phase("weight_sync"):
            self._actor, self._actor_updates, self._version = actor, actor.updates, version
            metrics = self._run(self._send(actor, version))
        if self._parts.probe is not None:
            with self._phase("weight_probe"):
                metrics |= self._compare(self._parts.probe, actor, version)
        return metrics

    async def _send(self, actor: TrainHandle, version: int) -> Metrics:
        if self._asleep:
            actor.release_memory()  # the trainer's allocator would keep it from the rollout
            await self._engine.wake_up(("weights",))
        metrics = await self._parts.publisher.send(self._source(actor), version)
        if self._asleep:
            actor.release_memory()
            await self._engine.wake_up(("kv_cache",))
            self._asleep = False
        return metrics

    def _source(self, actor: TrainHandle) -> Source:
        """Choose what the actor sends: all weights, or base and adapter separately."""
        dtype, in_files = self._parts.dtype, self._parts.in_files
        config = actor.adapter_config() if self._parts.adapter is not None else None
        if config is None or not self._goes_alone(config):
            return Source(lambda: actor.weights(dtype, in_files))
        alone = (lambda: actor.adapter(dtype)), Adapter(ADAPTER, config)
        return Source(lambda: actor.base_weights(dtype, in_files), alone)

    def _goes_alone(self, config: Mapping[str, Any]) -> bool:
        """Return whether the rollout takes the adapter by itself. Raises ConfigError if it must but cannot."""
        rule = self._parts.adapter
        reason = "" if rule is None else rule.unfit(AdapterKind.of(config, rule.model))
        if reason and rule is not None and rule.required:
            raise ConfigError(f"actor.lora.sync: adapter, but the rollout cannot take this adapter by itself: {reason}")
        return not reason

    async def _restore(self, replica: Any) -> bool:
        """Send the actor's weights to a restarted replica, if the others still serve these weights.

        If the actor is trained meanwhile, the stream mixes two versions or is outdated although its checksum matches:
        then return False, and the next sync includes the replica.
        """
        actor, version = self._actor, self._version
        if actor is None or actor.updates != self._actor_updates:
            return False
        updates = actor.updates
        await self._parts.publisher.restore(replica, self._source(actor), version)
        return (self._actor, actor.updates, self._version) == (actor, updates, version)

    def _compare(self, probe: Probe, actor: TrainHandle, version: int) -> Metrics:
        router = self._engine if isinstance(self._engine, Router) else None
        replicas = router.serving if router is not None else [self._engine]
        self._kept = merge_metrics(self._kept, self._engine.metrics())
        asked = self._run(probe.ask(replicas, version, router.replica_failed if router is not None else None))
        self._engine.metrics()  # discard the probe's metrics
        return probe.compare(asked, lambda batch: actor.infer_batch(batch), version)

    @property
    def weight_version(self) -> int:
        return self._engine.weight_version

    def metrics(self) -> Metrics:
        """Return the engine's metrics since the last call."""
        if self._snapshots is not None:
            lent = {} if self._lent is None else self._lent.metrics()
            return {**self._run(self._snapshots.metrics()), **lent}
        kept, self._kept = self._kept, {}
        return merge_metrics(kept, self._engine.metrics())

    def close(self) -> None:
        """End all servers and the sender of weights. May be called again."""
        try:
            if self._control is not None:
                self._control.cancel()
            if self._snapshots is not None:
                self._run(self._snapshots.close())
            if isinstance(self._engine, Router):
                self._run(self._engine.close())
        finally:
            self._run(self._parts.publisher.close())


__all__ = ["ADAPTER", "AdapterRule", "LocalPublisher", "RolloutHandle", "RolloutParts", "RunFn", "ServerPublisher"]
