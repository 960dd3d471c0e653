"""Send the weights of one version to servers, through one transport of `hone.weights`.

    whole weights      every send: Full
    a LoRA adapter     to a server that does not hold the base yet: Full (the base), then Adapter; else Adapter alone

Each server proves what it received. One that dies or hangs meanwhile is started again; the others go on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager

from hone.rollout.base import ServerAdapter
from hone.rollout.router import Router
from hone.types import Metric, Metrics, merge_metrics
from hone.weights.base import Full, Payload, Source, StreamFn, VersionWeights, WeightSyncError
from hone.weights.sender import make_sender
from hone.weights.settings import WeightSyncConfig
from hone.weights.sync import CheckpointEngineManager

WATCH_S = 0.5  # between two looks at whether the receivers of a sync are alive
SPEECHLESS_S = 3.0  # wait after its end for the more exact error of its connection
DYING_S = 10.0  # a process may appear alive this long after its sync failed, on a busy machine


class WeightSender:
    """Sends to the servers of a router; those that have proved a version serve it."""

    def __init__(self, router: Router, config: WeightSyncConfig, token: str) -> None:
        self._router = router
        self._engine = make_sender(config, token)
        self._manager = CheckpointEngineManager(self._engine)

    async def send(self, weights: VersionWeights, names: Collection[str]) -> Metrics:
        """Send to these servers; those that prove the version serve it, if the weights are still its own.

        Those that die or hang meanwhile are restarted; other failures are errors.
        """
        replicas = {replica.name: replica for replica in self._router.replicas if replica.name in names}
        if not replicas:
            return {}
        for name in [name for name in self._manager.versions if name not in replicas]:
            self._manager.remove_replica(name)
        with self._router.updating(replicas.values()):
            try:
                return await self._send(weights.source, weights.version, replicas)
            finally:  # also if the sync failed for others
                if await asyncio.to_thread(weights.is_current):
                    self._serve(weights.version, replicas)

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
        # dead replicas are being restarted, and are sent both afterwards
        left = {name: one for name, one in replicas.items() if one.alive and one.has_base}
        if not left:
            return metrics
        return merge_metrics(metrics, await self._sync(stream, version, left, payload))

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


__all__ = ["WeightSender"]
