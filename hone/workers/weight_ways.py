"""The ways of a weight sync, as the rollout's handle sees them: in this process, or through a channel to servers.

    whole weights      every sync: Full
    a LoRA adapter     to a replica that does not hold the base yet: Full (the base), then Adapter; else Adapter alone

Here engines of `rollout` and transports of `weights` meet; neither knows the other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from hone.config import ConfigError
from hone.rollout.base import RolloutEngine, ServerAdapter
from hone.rollout.router import Router
from hone.types import Metric, Metrics, merge_metrics
from hone.weights.base import Adapter, Full, NamedTensors, Payload, Receipt, WeightSyncError
from hone.weights.local import sync
from hone.weights.sender import make_sender
from hone.weights.settings import WeightSyncConfig
from hone.weights.sync import CheckpointEngineManager

WATCH_S = 0.5  # between two looks at whether the receivers of a sync are alive
SPEECHLESS_S = 3.0  # after its end; a connection that broke with it has told more by then
DYING_S = 10.0  # how long a process may take to be seen dead, on a busy machine, after a sync with it failed

StreamFn = Callable[[], NamedTensors]
"""Begins the trainer's weights from their first tensor; every call gives the whole stream."""


@dataclass(frozen=True, slots=True)
class Source:
    """What the trainer has to send."""

    whole: StreamFn  # every weight; of a policy whose adapter travels alone, without the adapter
    adapter: tuple[StreamFn, Adapter] | None = None  # the adapter that travels alone, and what it is; None: none does


class WeightWay(Protocol):
    """Brings the trainer's weights to every replica, or raises WeightSyncError."""

    async def send(self, source: Source, version: int) -> Metrics: ...

    async def restore(self, replica: Any, source: Source, version: int) -> None:
        """Bring them to one replica that was started anew."""

    async def close(self) -> None: ...


class LocalWay:
    """Engines in this process: each copies from the trainer's tensors."""

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
        """Base and adapter come without a pause between them in which the engine could sample from the base."""
        if source.adapter is None:
            return await sync(source.whole(), engine.update_weights, version)
        stream, payload = source.adapter

        async def put(tensors: NamedTensors, version: int) -> Receipt:
            return await engine.update_adapter(tensors, payload.config, version)

        metrics = {} if engine.has_base else await sync(source.whole(), engine.update_weights, version)
        return merge_metrics(metrics, await sync(stream(), put, version))

    async def close(self) -> None:
        return None


class ChannelWay:
    """Servers: one transport feeds them all, and each proves what it took in."""

    def __init__(self, router: Router, config: WeightSyncConfig, token: str) -> None:
        self._router = router
        self._engine = make_sender(config, token)
        self._manager = CheckpointEngineManager(self._engine)
        self._turn: asyncio.Lock | None = None  # one sync at a time: there is one sender

    async def send(self, source: Source, version: int) -> Metrics:
        """To every replica that is up. Those that die meanwhile are started again; any other failure is an error."""
        self._router.look()
        if not self._router.replicas:
            await self._router.revived()
        replicas = {replica.name: replica for replica in self._router.replicas}
        if not replicas:
            raise WeightSyncError(f"no rollout replica is left to receive weight version {version}")
        async with self._lock:
            for name in [name for name in self._manager.versions if name not in replicas]:
                self._manager.remove_replica(name)
            metrics = await self._send(source, version, replicas)
        for replica in self._router.replicas:
            if replica.name in self._manager.versions:
                self._router.replica_serves(replica)
        return metrics

    async def _send(self, source: Source, version: int, replicas: dict[str, ServerAdapter]) -> Metrics:
        if source.adapter is None:
            return await self._sync(source.whole, version, replicas, Full())
        stream, payload = source.adapter
        without = {name: one for name, one in replicas.items() if not one.has_base}
        metrics: Metrics = {}
        if without:
            metrics = await self._sync(source.whole, version, without, Full(), resume=False)
        # those that died are being started again, and `restore` brings them both
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
            dead = await _dead(failed, enough=1 if self._engine.all_or_none else len(failed))
            if not dead or (len(dead) < len(failed) and not self._engine.all_or_none):
                raise
            for replica in dead:
                self._router.replica_failed(replica, str(error))
            if living := [replica for replica in failed if replica not in dead]:  # they missed it with the dead one
                for replica in living:
                    self._manager.add_replica(replica)
                return await self._manager.sync(stream(), version, payload, [one.name for one in living], resume)
            left = len(replicas) - len(dead)
            return {"weights/version": Metric.max(version), "weights/replicas": Metric.max(left)}

    @asynccontextmanager
    async def _watching(self, replicas: Mapping[str, ServerAdapter]) -> AsyncIterator[None]:
        """Wait for nobody who has ended: a machine that lost its network closes no connection."""

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


async def _dead(replicas: Sequence[ServerAdapter], enough: int) -> list[ServerAdapter]:
    """Whose process has ended; an end shows a moment after its connections broke, so `enough` are waited for."""
    deadline = time.monotonic() + DYING_S
    while len(dead := [replica for replica in replicas if not replica.alive]) < enough:
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(0.05)
    return dead


__all__ = ["ChannelWay", "LocalWay", "Source", "StreamFn", "WeightWay"]
