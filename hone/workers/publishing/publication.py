"""Publication of weights to servers: which versions are kept, and which replica is brought which of them.

    trainer's thread   take(source) --> itself or a copy, publish --.     train              reached
                                                                    v                          |
    event loop         kept versions --> moves? --> WeightSender.send --> proven -------- signal
                            ^              ^  ^
              no draw needs it: dropped    |  `-- a request came or ended, a replica came back (Seats.changed)
                                           `-- a draw ended (hold)

`hone.schedule.seats` decides which replicas take which version. One send happens at a time, because there is one
sender; replicas that are not part of it go on. A replica that restarts is empty, and gets its weights in the same way.

With a staleness of 0 the trainer's own tensors are sent, so `publish` returns when every replica serves them.
With more a copy is sent (`Snapshot`), so `publish` returns at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from typing import Protocol

from hone.rollout.router import Router
from hone.schedule.seats import moves, needed
from hone.types import Metric, Metrics, Versions, merge_metrics
from hone.weights.base import Source, VersionWeights, WeightSyncError
from hone.weights.snapshot import Snapshot

LOG = logging.getLogger("hone")

LOOK_S = 0.5  # between two looks at the replicas while nothing happens


class Sender(Protocol):
    """Sender of weights to some replicas, which serve them afterwards."""

    async def send(self, weights: VersionWeights, names: Collection[str]) -> Metrics: ...

    async def close(self) -> None: ...


class ToServers:
    """Publication to servers: keeps versions, and brings each replica the one that open draws allow."""

    def __init__(self, router: Router, sender: Sender, copies: bool) -> None:
        """`copies`: the trainer trains while weights are sent, so a copy of them is."""
        self.sender = sender
        self._is_needed: Callable[[int], bool] = lambda version: False
        self._router = router
        self._copies = copies
        self._kept: dict[int, VersionWeights] = {}
        self._proven = -1  # the newest version that a replica has proven: another that cannot take it has a fault
        self._held: Counter[Versions] = Counter()
        self._newest: Snapshot | None = None
        self._task: asyncio.Task[None] | None = None
        self._signal: asyncio.Future[None] | None = None
        self._failure: BaseException | None = None
        self._metrics: Metrics = {}
        self._times = _Times()
        router.seats.changed = self._notify

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def take(self, source: Source, version: int, is_unchanged: Callable[[], bool]) -> VersionWeights:
        if not self._copies:
            return VersionWeights(version, source, is_unchanged)
        self.check()
        began = time.perf_counter()
        self._newest = Snapshot.of(source, version, self._newest)
        self._times.copied += time.perf_counter() - began
        return self._newest.weights()

    def keep_while(self, is_needed: Callable[[int], bool]) -> None:
        self._is_needed = is_needed

    # ------------------------------------------------------------------------------------------ on the event loop

    async def publish(self, weights: VersionWeights) -> Metrics:
        if self._copies:
            self._keep(weights)
            return {}
        # The tensors of earlier versions are gone, and what replicas prove of this one may be an earlier launch's.
        self._failure, self._proven, self._metrics = None, -1, {}
        self._kept.clear()
        self._router.pool.outdated()
        self._keep(weights)
        try:
            await self.reached(weights.version, inf)  # the sync has deadlines of its own
        finally:
            self._failure = None  # it is raised here
        found, self._metrics = self._metrics, {}
        return found

    async def withdraw(self) -> None:
        self._kept.clear()
        while any(one.state == "updating" for one in self._router.pool.members):
            await self._wait(LOOK_S)
        if self._failure is not None:  # of weights that nobody needs any more
            LOG.warning("a weight sync that was given up had failed: %s", self._failure)

    def _keep(self, weights: VersionWeights) -> None:
        """Send these weights as soon as replicas may take them."""
        self._kept[weights.version] = weights
        self._forget()  # here too, because a send takes a while and the trainer may publish again meanwhile
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._keep_sending(), name="publication of weights")
        self._notify()

    @contextmanager
    def hold(self, versions: Versions) -> Iterator[None]:
        self._held[versions] += 1
        try:
            yield
        finally:
            self._held[versions] -= 1
            if not self._held[versions]:
                del self._held[versions]
            self._notify()

    async def reached(self, version: int, timeout_s: float) -> None:
        deadline, began = time.monotonic() + timeout_s, time.perf_counter()
        while not self._router.pool.has_proven(version):
            self.check()
            if self._router.pool.are_all_lost:
                raise WeightSyncError(
                    f"no rollout replica is left to receive weight version {version}: {self._router.pool.describe()}"
                )
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"weight version {version} was not proven by every rollout replica within {timeout_s:g} s: "
                    f"{self._router.pool.describe()}; open draws need the versions {sorted(self._held)}"
                )
            await self._wait(min(LOOK_S, timeout_s))
        self._times.waited += time.perf_counter() - began

    async def metrics(self) -> Metrics:
        self.check()
        found, self._metrics = self._metrics, {}
        times, self._times = self._times, _Times()
        return merge_metrics(found, times.metrics())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.sender.close()

    async def _keep_sending(self) -> None:
        """Send whatever replicas may take; a failure is kept for `check`, and ends every request without a seat."""
        try:
            while True:
                self._router.look()
                found = await self._moves()
                if found:
                    await self._send_to(found)
                else:
                    await self._wait(LOOK_S)
                self._forget()
        except Exception as error:  # noqa: BLE001  whatever it is, the trainer's next call raises it
            self._failure = error
            self._router.seats.refuse(error)
            self._notify()

    async def _moves(self) -> dict[str, int]:
        """Replica -> the version that it takes now; live weights that the trainer has changed since are none."""
        pool, waits = self._router.pool, self._router.seats.waits
        if not self._kept or (not waits and pool.has_proven(max(self._kept))):
            return {}
        if not self._copies:
            self._kept = {version: one for version, one in self._kept.items() if one.is_current()}
        return moves(pool.standings(), self._router.seats.waiting, self._held, self._kept)

    def _forget(self) -> None:
        """Drop the versions that no draw needs; one that is being sent stays until its send has ended."""
        for version in self._kept.keys() - needed([*self._held, *self._router.seats.waiting], self._kept):
            if not self._is_needed(version):
                del self._kept[version]

    async def _send_to(self, found: Mapping[str, int]) -> None:
        """Send the oldest version of those that replicas may take, to all of them that take it."""
        version = min(found.values())
        names = [name for name, one in found.items() if one == version]
        weights, began = self._kept[version], time.perf_counter()
        try:
            metrics = await self.sender.send(weights, names)
        except WeightSyncError as error:
            is_current = await asyncio.to_thread(weights.is_current)  # raises for a copy that was changed
            if is_current and (version > self._proven or not error.replicas):
                raise
            self._failed(error.replicas, error)  # others have proven it, or the trainer went on
            return
        except Exception as error:
            if self._copies or version > self._proven:
                raise
            proven = {one.name for one in self._router.pool.serving if one.version >= version}
            self._failed(set(names) - proven, error)
            return
        if self._kept.get(version) is not weights:  # the trainer has published others meanwhile
            return
        if any(one.version >= version for one in self._router.pool.serving):  # else all have died meanwhile
            self._proven = max(self._proven, version)
        self._times.sent += time.perf_counter() - began
        self._metrics = merge_metrics(self._metrics, metrics)
        self._notify()

    def _failed(self, names: Collection[str], error: Exception) -> None:
        """Start these replicas again."""
        for one in self._router.replicas:
            if one.name in names:
                self._router.replica_failed(one, f"{type(error).__name__}: {error}")

    async def _wait(self, seconds: float) -> None:
        """Wait until something changes, or so long."""
        if self._signal is None or self._signal.done():
            self._signal = asyncio.get_running_loop().create_future()
        await asyncio.wait({self._signal}, timeout=seconds)

    def _notify(self) -> None:
        if self._signal is not None and not self._signal.done():
            self._signal.set_result(None)


class _Times:
    """Seconds since the last call of `metrics`."""

    def __init__(self) -> None:
        self.copied = self.sent = self.waited = 0.0

    def metrics(self) -> Metrics:
        """The share of publication that the trainer did not wait for."""
        if not self.copied:  # it waits for all of it
            return {}
        whole = self.copied + self.sent
        hidden = max(0.0, self.sent - self.waited)
        return {"perf/publication_hidden_fraction": Metric.mean(hidden / whole, whole)}


__all__ = ["Sender", "ToServers"]
