"""The rollout role as the trainer uses it: generation for episodes, and publication of weights.

    RolloutHandle --generate--> engine or router
                  --publish(actor)--> Publication: copies inside this process (`InProcess`, here), or sends to
                                      servers (`publication.ToServers`)

Engines of `rollout` and transports of `weights` meet only in this package; neither imports the other.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from hone.weights.base import AdapterTensors, LoadedWeights, NamedTensors, Source, VersionWeights
from hone.weights.in_process import sync
from hone.weights.settings import WeightSyncConfig
from hone.workers.control import Membership, serve_control
from hone.workers.publishing.probe import Probe
from hone.workers.train import TrainHandle

R = TypeVar("R")
ADAPTER = "policy"  # name of the policy's own adapter on the servers
LENT_S = 10.0  # for the result of a coroutine that has ended


@dataclass(frozen=True, slots=True)
class AdapterRule:
    """When a policy's LoRA adapter is sent without its base, after the base was sent once."""

    unfit: Callable[[AdapterKind], str]  # why the rollout cannot serve it; empty if it can
    required: bool  # an unsupported adapter is an error instead of being merged
    model: str  # transformers' `model_type` of the policy


@dataclass(frozen=True, slots=True)
class Background:
    """Parts with which a rollout receives weights while training goes on."""

    router: Router
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


class Generator(Protocol):
    """The rollout engine of a run: the one in this process, or the router of several."""

    @property
    def weight_version(self) -> int: ...

    async def generate(self, request: GenerationRequest) -> Completion: ...

    async def abort_all(self) -> None: ...

    async def sleep(self, level: int) -> None: ...

    async def wake_up(self, tags: tuple[str, ...]) -> None: ...

    def metrics(self) -> Metrics: ...


class Publication(Protocol):
    """Brings the trainer's weights to every replica."""

    def take(self, source: Source, version: int, is_unchanged: Callable[[], bool]) -> VersionWeights:
        """Take the weights to publish, on the trainer's thread. `is_unchanged`: whether they are still `version`."""

    async def publish(self, weights: VersionWeights) -> Metrics:
        """Return when the trainer may change its weights. Raises WeightSyncError."""

    async def withdraw(self) -> None:
        """Send nothing until the next `publish`; a send that has begun ends first, within its own deadlines."""

    async def reached(self, version: int, timeout_s: float) -> None:
        """Wait until every running replica has proven `version` or a newer one. Raises TimeoutError."""

    def hold(self, versions: Versions) -> AbstractContextManager[None]:
        """Keep these versions available to one draw."""

    def keep_while(self, is_needed: Callable[[int], bool]) -> None:
        """Keep each version while `is_needed` says so, also for a draw that is not open yet."""

    def check(self) -> None:
        """Raise the error of a publication that failed."""

    async def metrics(self) -> Metrics:
        """Figures of publications since the last call."""

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RolloutParts:
    """Parts of a rollout (`workers.rollout` builds it)."""

    engine: Generator
    dtype: torch.dtype  # of its weights
    in_files: bool  # whether it loads weights in the layout of the model's files: every expert by itself
    publication: Publication
    replicas: Callable[[], Sequence[Any]]  # that serve now
    sleep_level: int = 0  # what it frees while the policy is trained; 0: nothing
    probe: Probe | None = None  # compares log-probs of both sides after each sync
    adapter: AdapterRule | None = None  # None: adapters are merged into the weights
    background: Background | None = None  # None: weights are sent between steps, while training waits
    lost: Callable[[Any, str], None] | None = None  # called with a replica that has died, and why; None: none can
    start: Callable[[], Coroutine[Any, Any, None]] | None = None  # starts its servers; None: it has none
    end: Callable[[], Coroutine[Any, Any, None]] | None = None  # ends its engines; None: they end with this process
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
    """The rollout role: generates for episodes and receives weights, once `start` has started its servers."""

    def __init__(self, parts: RolloutParts, loop: Loop, phase: PhaseFn) -> None:
        self._parts = parts
        self._engine = parts.engine
        self._publication = parts.publication
        self._loop = loop
        self._run: RunFn = loop.run
        self._phase = phase
        self._actor: TrainHandle | None = None  # whose weights are served
        self._kept: Metrics = {}  # from before a probe, for the next `metrics` call
        self._asleep = False
        self._begin = parts.start  # None: nothing is left to start
        self._control: Future[None] | None = None
        self._lent: LentServer | None = None if parts.background is None else parts.background.lent

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
        if (background := self._parts.background) is not None:
            membership = Membership(background.router, background.another, background.timeout_s)
            self._control = self._loop.start(serve_control(background.control, membership))

    async def generate(self, request: GenerationRequest) -> Completion:
        """One completion. Raises PromptTooLong where `max_sequence_tokens` leaves no room, and as engines do."""
        self._publication.check()
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

        The rollout generates nothing until the next `publish`, which wakes the engine.
        """
        if self._parts.sleep_level and not self._asleep:
            with self._phase("sleep"):
                self._run(self._sleep())
            self._asleep = True

    async def _sleep(self) -> None:
        await self._publication.withdraw()  # a server that sleeps has no room for weights
        await self._engine.sleep(self._parts.sleep_level)

    def hold(self, versions: Versions) -> AbstractContextManager[None]:
        """Keep these versions available to one draw until it has ended, between its turns too. On the event loop."""
        return self._publication.hold(versions)

    def keep_while(self, is_needed: Callable[[int], bool]) -> None:
        """Keep the snapshot of each version while `is_needed` says so; it is called on the event loop."""
        self._publication.keep_while(is_needed)

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

    # ---------------------------------------------------------------------------------------------------- weights

    def publish(self, actor: TrainHandle, version: int) -> Metrics:
        """Publish the actor's weights as `version`; return when the actor may train again.

        That is at once if a copy is sent, else when every replica has proved that it serves them. Raises the error of
        this publication, or of an earlier one.
        """
        updates = actor.updates
        with self._phase("weight_sync"):
            self._actor = actor
            weights = self._publication.take(self._source(actor), version, lambda: actor.updates == updates)
            metrics = self._run(self._send(actor, weights))
        if self._parts.probe is not None:
            with self._phase("weight_probe"):
                metrics |= self._compare(self._parts.probe, actor, version)
        return metrics

    async def _send(self, actor: TrainHandle, weights: VersionWeights) -> Metrics:
        if self._asleep:
            actor.release_memory()  # the trainer's allocator would keep it from the rollout
            await self._engine.wake_up(("weights",))
        metrics = await self._publication.publish(weights)
        if self._asleep:
            actor.release_memory()
            await self._engine.wake_up(("kv_cache",))
            self._asleep = False
        return metrics

    def wait_for(self, version: int, timeout_s: float) -> None:
        """Wait until every running replica has proven `version` or a newer one. Raises TimeoutError."""
        with self._phase("weight_sync"):
            self._run(self._publication.reached(version, timeout_s))

    def sync_from(self, actor: TrainHandle, version: int) -> Metrics:
        """Publish the actor's weights, and wait until every replica has proved that it serves them."""
        metrics = self.publish(actor, version)
        if self._parts.background is not None:
            self.wait_for(version, self._parts.background.timeout_s)
        return metrics

    def _source(self, actor: TrainHandle) -> Source:
        """Choose what the actor sends: all weights, or base and adapter separately."""
        dtype, in_files = self._parts.dtype, self._parts.in_files
        config = actor.adapter_config() if self._parts.adapter is not None else None
        if config is None or not self._goes_alone(config):
            return Source(lambda: actor.weights(dtype, in_files))
        alone = (lambda: actor.adapter(dtype)), AdapterTensors(ADAPTER, config)
        return Source(lambda: actor.base_weights(dtype, in_files), alone)

    def _goes_alone(self, config: Mapping[str, Any]) -> bool:
        """Return whether the rollout takes the adapter by itself. Raises ConfigError if it must but cannot."""
        rule = self._parts.adapter
        reason = "" if rule is None else rule.unfit(AdapterKind.of(config, rule.model))
        if reason and rule is not None and rule.required:
            raise ConfigError(f"actor.lora.sync: adapter, but the rollout cannot take this adapter by itself: {reason}")
        return not reason

    def _compare(self, probe: Probe, actor: TrainHandle, version: int) -> Metrics:
        self._kept = merge_metrics(self._kept, self._engine.metrics())
        asked = self._run(probe.ask(self._parts.replicas(), version, self._parts.lost))
        self._engine.metrics()  # discard the probe's metrics
        return probe.compare(asked, lambda batch: actor.infer_batch(batch), version)

    @property
    def weight_version(self) -> int:
        return self._engine.weight_version

    def metrics(self) -> Metrics:
        """Return the metrics of engine and publications since the last call."""
        kept, self._kept = self._kept, {}
        lent = {} if self._lent is None else self._lent.metrics()
        return {**merge_metrics(kept, self._run(self._metrics())), **lent}

    async def _metrics(self) -> Metrics:
        return merge_metrics(await self._publication.metrics(), self._engine.metrics())

    def close(self) -> None:
        """End all servers and the sender of weights. May be called again."""
        try:
            if self._control is not None:
                self._control.cancel()
            self._run(self._publication.close())
        finally:
            if self._parts.end is not None:
                self._run(self._parts.end())


class InProcess:
    """Publication to engines in this process, which copy the trainer's tensors while it waits."""

    def __init__(self, engines: Sequence[RolloutEngine], config: WeightSyncConfig) -> None:
        if config.transport is not None:
            raise ConfigError(
                f"weights.transport: {config.transport.name!r} is for servers; the rollout runs in the trainer's "
                "process, where weights are copied"
            )
        self._engines = engines

    def take(self, source: Source, version: int, is_unchanged: Callable[[], bool]) -> VersionWeights:
        return VersionWeights(version, source, is_unchanged)

    async def publish(self, weights: VersionWeights) -> Metrics:
        metrics: Metrics = {}
        for engine in self._engines:
            metrics = await self._to(engine, weights.source, weights.version)
        return {**metrics, "weights/replicas": Metric.max(len(self._engines))}

    async def _to(self, engine: RolloutEngine, source: Source, version: int) -> Metrics:
        """Load base and adapter together, so that the engine never samples from the base alone."""
        if source.adapter is None:
            return await sync(source.whole(), engine.update_weights, version)
        stream, payload = source.adapter

        async def put(tensors: NamedTensors, version: int) -> LoadedWeights:
            return await engine.update_adapter(tensors, payload.config, version)

        metrics = {} if engine.has_base else await sync(source.whole(), engine.update_weights, version)
        return merge_metrics(metrics, await sync(stream(), put, version))

    async def withdraw(self) -> None:
        return None  # `publish` has copied them

    async def reached(self, version: int, timeout_s: float) -> None:
        return None

    def hold(self, versions: Versions) -> AbstractContextManager[None]:
        return nullcontext()

    def keep_while(self, is_needed: Callable[[int], bool]) -> None:
        return None

    def check(self) -> None:
        return None

    async def metrics(self) -> Metrics:
        return {}

    async def close(self) -> None:
        return None


__all__ = [
    "ADAPTER",
    "AdapterRule",
    "Background",
    "DeviceShare",
    "InProcess",
    "Loop",
    "Publication",
    "RolloutHandle",
    "RolloutParts",
    "RunFn",
]
