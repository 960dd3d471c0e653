"""The ways of a weight sync, as the rollout's handle sees them: in this process, or through a channel to servers.

Here engines of `rollout` and transports of `weights` meet; neither knows the other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hone.config import ConfigError
from hone.rollout.base import RolloutEngine, ServerAdapter
from hone.rollout.router import Router
from hone.types import Metric, Metrics
from hone.weights import TRANSPORTS
from hone.weights.base import NamedTensors, WeightSyncError
from hone.weights.local import sync
from hone.weights.settings import WeightSyncConfig
from hone.weights.sync import CheckpointEngineManager

DYING_S = 10.0  # how long a process may take to be seen dead, on a busy machine, after a sync with it failed

StreamFn = Callable[[], NamedTensors]
"""Begins the trainer's weights from their first tensor; every call gives the whole stream."""


class WeightWay(Protocol):
    """Brings the trainer's weights to every replica, or raises WeightSyncError."""

    async def send(self, stream: StreamFn, version: int) -> Metrics: ...

    async def restore(self, replica: Any, stream: StreamFn, version: int) -> None:
        """Bring them to one replica that was started anew."""

    async def close(self) -> None: ...


class LocalWay:
    """Engines in this process: each copies from the trainer's tensors."""

    def __init__(self, engines: Sequence[RolloutEngine], config: WeightSyncConfig) -> None:
        if config.transport not in ("auto", "local"):
            raise ConfigError(
                f"weights.transport: {config.transport!r} is for servers; the rollout runs in the trainer's process, "
                "where weights are copied (local)"
            )
        self._engines = engines

    async def send(self, stream: StreamFn, version: int) -> Metrics:
        metrics: Metrics = {}
        for engine in self._engines:
            metrics = await sync(stream(), engine.update_weights, version)
        return {**metrics, "weights/replicas": Metric.max(len(self._engines))}

    async def restore(self, replica: Any, stream: StreamFn, version: int) -> None:
        await sync(stream(), replica.update_weights, version)

    async def close(self) -> None:
        return None


class ChannelWay:
    """Servers: one transport feeds them all, and each proves what it took in."""

    def __init__(self, router: Router, config: WeightSyncConfig, token: str) -> None:
        transport = "ipc" if config.transport == "auto" else config.transport
        if transport == "local":
            raise ConfigError("weights.transport: 'local' is within one process; servers need ipc, or auto")
        if transport not in TRANSPORTS:
            raise ConfigError(f"weights.transport: {transport!r} is unknown (there is: {', '.join(TRANSPORTS)})")
        self._router = router
        self._engine = TRANSPORTS.get(transport)(config.bucket_mib * 2**20, config.timeout_s, token)
        self._manager = CheckpointEngineManager(self._engine)
        self._turn: asyncio.Lock | None = None  # one sync at a time: there is one sender

    async def send(self, stream: StreamFn, version: int) -> Metrics:
        """To every replica that is up. Those that die meanwhile are started again; any other failure is an error."""
        self._router.look()
        if not self._router.replicas:
            await self._router.revived()
        replicas = {replica.name: replica for replica in self._router.replicas}
        if not replicas:
            raise WeightSyncError(f"no rollout replica is left to receive weight version {version}")
        metrics = await self._sync(stream, version, replicas)
        for replica in self._router.replicas:
            if replica.name in self._manager.versions:
                self._router.replica_serves(replica)
        return metrics

    async def restore(self, replica: ServerAdapter, stream: StreamFn, version: int) -> None:
        async with self._lock:
            self._manager.remove_replica(replica.name)
            self._manager.add_replica(replica)
            await self._manager.sync(stream(), version, only=[replica.name])

    async def _sync(self, stream: StreamFn, version: int, replicas: dict[str, ServerAdapter]) -> Metrics:
        async with self._lock:
            for name in [name for name in self._manager.versions if name not in replicas]:
                self._manager.remove_replica(name)
            for name, replica in replicas.items():
                if name not in self._manager.versions:
                    self._manager.add_replica(replica)
            try:
                return await self._manager.sync(stream(), version)
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
                    return await self._manager.sync(stream(), version)
                left = len(replicas) - len(dead)
                return {"weights/version": Metric.max(version), "weights/replicas": Metric.max(left)}

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


__all__ = ["ChannelWay", "LocalWay", "StreamFn", "WeightWay"]
