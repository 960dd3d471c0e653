"""Run weight syncs: pause the replicas, send and receive at the same time, verify, resume.

    sync(weights, version)
      pause every replica --> engine.prepare --offer--> replica.receive_weights   (a task each) --.
                                    |                                                             |-> verify --> resume
                              engine.send_weights                                  (one task) ----'
      if a replica's task fails, the engine drops it, it is stopped, and the WeightSyncError names it;
      the others finish, are verified and resume.

One deadline covers the whole sync; a replica that is waited for and silent for a third of it (`PATIENCE`) is lost
earlier, so that the others can finish. This file is independent of transports and servers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from hone.types import Metric, Metrics, PauseMode
from hone.weights import PATIENCE
from hone.weights.base import (
    CheckpointEngine,
    Full,
    NamedTensors,
    Offer,
    Payload,
    Receipt,
    Replica,
    Sent,
    WeightSyncError,
    verify,
)

REASON_TIMEOUT_S = 10.0  # time for a replica that the channel lost to report its reason
STOP_TIMEOUT_S = 10.0  # after this its owner has to kill the replica (`WeightSyncError.silent`)


class CheckpointEngineManager:
    """Syncs the replicas of a run through one transport."""

    def __init__(self, engine: CheckpointEngine, pause_mode: PauseMode = "keep") -> None:
        """`pause_mode` is the argument of `Replica.pause` before each sync."""
        self._engine = engine
        self._pause_mode = pause_mode
        self._replicas: dict[str, Replica] = {}
        self._versions: dict[str, int] = {}

    def add_replica(self, replica: Replica) -> None:
        """Add a replica, which receives from the next sync on. Raises ValueError if the name is taken."""
        if replica.name in self._replicas:
            raise ValueError(f"replica {replica.name} was already added; use another name")
        self._replicas[replica.name] = replica

    def remove_replica(self, name: str) -> None:
        """Remove a replica. An unknown name is no error, because a failed sync removes replicas too."""
        self._replicas.pop(name, None)
        self._versions.pop(name, None)

    @property
    def versions(self) -> Mapping[str, int | None]:
        """Replica -> the version that it verifiably serves; None before its first sync."""
        return {name: self._versions.get(name) for name in self._replicas}

    async def sync(
        self,
        weights: NamedTensors,
        version: int,
        payload: Payload | None = None,
        only: Sequence[str] | None = None,
        resume: bool = True,
    ) -> Metrics:
        """Send `weights` as `version` to every replica, or to those in `only` (such as a restarted one), and verify.

        Without `resume` the replicas stay paused, for base weights that are followed by an adapter. Raises
        WeightSyncError; the replicas that it names are stopped and removed, and all others serve `version`.
        """
        chosen = {name: self._replicas[name] for name in (self._replicas if only is None else only)}
        if not chosen:
            raise WeightSyncError(f"there is no replica to receive weight version {version}")
        failed: dict[str, str] = {}
        started = time.perf_counter()
        try:
            sent = await self._transfer(chosen, weights, version, payload or Full(), failed)
        finally:
            await self._engine.finalize()
        seconds = time.perf_counter() - started
        if resume:
            await self._each(chosen, failed, {n: r.resume for n, r in chosen.items() if n not in failed}, "resume")
        for name in chosen:
            if name not in failed:
                self._versions[name] = version
        if failed:
            await self._give_up(chosen, failed, version)
        return {
            "weights/version": Metric.max(version),
            "weights/bytes": Metric.sum(sent.bytes),
            "weights/tensors": Metric.max(sent.tensors),
            "weights/buckets": Metric.max(sent.buckets),
            "weights/replicas": Metric.max(len(chosen)),
            "weights/senders": Metric.max(max(1, len(sent.by_rank))),
            "perf/weight_transfer_seconds": Metric.mean(seconds),
            "perf/weight_sync_gb_per_s": Metric.mean(sent.bytes / seconds / 1e9),
        }

    async def _transfer(
        self,
        chosen: Mapping[str, Replica],
        weights: NamedTensors,
        version: int,
        payload: Payload,
        failed: dict[str, str],
    ) -> Sent:
        """Pause, send, receive, verify; put each replica that fails into `failed`, with the reason."""
        await self._each(chosen, failed, {n: partial(r.pause, self._pause_mode) for n, r in chosen.items()}, "pause")
        receiving = {name: replica for name, replica in chosen.items() if name not in failed}
        if not receiving:
            await self._give_up(chosen, failed, version)
        receipts: dict[str, Sequence[Receipt]] = {}
        tasks: dict[str, asyncio.Task[None]] = {}  # by replica
        limit = asyncio.timeout(self._engine.timeout_s + STOP_TIMEOUT_S)
        sent: Sent | None = None
        try:
            async with limit:
                self._engine.build_topology({name: replica.ranks for name, replica in receiving.items()})
                offer = self._engine.prepare(version, payload)
                for name, replica in receiving.items():
                    receive = self._receive(replica, offer, receipts, failed)
                    tasks[name] = asyncio.create_task(receive, name=f"receive weights: {name}")
                await self._engine.init_process_group()
                sent = await self._engine.send_weights(weights, version)
                if lost := [task for name, task in tasks.items() if name in sent.lost]:
                    await asyncio.wait(lost, timeout=REASON_TIMEOUT_S)  # its own reason is more precise
                for name, reason in sent.lost.items():
                    failed.setdefault(name, reason)
                await asyncio.gather(*(task for name, task in tasks.items() if name not in failed))
        except BaseException as error:
            if not (isinstance(error, TimeoutError) and limit.expired()):
                failed.update({name: f"the sender failed: {error}" for name in receiving if name not in failed})
                await self._stop(chosen, failed)
                raise
            missing = [name for name in receiving if name not in receipts]
            reason = f"weight version {version} was not sent and acknowledged within {self._engine.timeout_s:g} s"
            late = receiving if sent is None else missing  # of weights that are still being sent nothing can be proven
            failed.update({name: reason for name in late if name not in failed})
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        sent = sent or Sent(version, "", 0, 0)
        for name in receiving:
            if name not in failed:
                _check(name, receiving[name].ranks, sent, receipts.get(name, ()), failed)
        return sent

    async def _receive(
        self, replica: Replica, offer: Offer, receipts: dict[str, Sequence[Receipt]], failed: dict[str, str]
    ) -> None:
        """Run one replica's side; report a failure to the sender at once, so that it does not wait for the deadline."""
        try:
            receipts[replica.name] = await replica.receive_weights(offer.for_replica(replica.name).to_json())
        except Exception as error:  # noqa: BLE001  whatever a server's client raises, this replica has failed
            failed[replica.name] = f"{type(error).__name__}: {error}"
            self._engine.drop(replica.name, failed[replica.name])

    async def _each(
        self,
        chosen: Mapping[str, Replica],
        failed: dict[str, str],
        calls: Mapping[str, Callable[[], Awaitable[None]]],
        what: str,
    ) -> None:
        """Make one call per replica, concurrently; a replica that raises or is late has failed."""
        limit_s = self._engine.timeout_s * PATIENCE

        async def one(name: str, call: Callable[[], Awaitable[None]]) -> None:
            try:
                async with asyncio.timeout(limit_s):
                    await call()
            except TimeoutError:
                failed[name] = f"it did not {what} within {limit_s:g} s"
            except Exception as error:  # noqa: BLE001  see _receive
                failed[name] = f"it did not {what}: {type(error).__name__}: {error}"

        await asyncio.gather(*(one(name, call) for name, call in calls.items()))

    async def _stop(self, chosen: Mapping[str, Replica], failed: Mapping[str, str]) -> dict[str, str]:
        """Stop and remove every failed replica, all at once; returns those that could not be stopped, and why."""
        silent: dict[str, str] = {}

        async def stop(name: str, reason: str) -> None:
            self.remove_replica(name)
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await chosen[name].stop(reason)
            except Exception as error:  # noqa: BLE001  see _receive; the sync's own error is raised by the caller
                silent[name] = f"{type(error).__name__}: {error}".rstrip(": ")

        await asyncio.gather(*(stop(name, reason) for name, reason in failed.items()))
        return silent

    async def _give_up(self, chosen: Mapping[str, Replica], failed: Mapping[str, str], version: int) -> None:
        silent = await self._stop(chosen, failed)
        reasons = [f"replica {name}: {reason}" for name, reason in failed.items()]
        reasons += [f"{name} could not be stopped ({reason})" for name, reason in silent.items()]
        raise WeightSyncError(
            f"weight version {version} is not served by {len(failed)} of {len(chosen)} replicas: {'; '.join(reasons)}",
            list(failed),
            list(silent),
        )


def _check(name: str, ranks: int, sent: Sent, receipts: Sequence[Receipt], failed: dict[str, str]) -> None:
    if len(receipts) != ranks:
        failed[name] = f"{len(receipts)} of its {ranks} ranks acknowledged version {sent.version}"
        return
    try:
        for rank, receipt in enumerate(receipts):
            verify(sent.to(name, rank), [receipt])
    except WeightSyncError as error:
        failed[name] = str(error)
