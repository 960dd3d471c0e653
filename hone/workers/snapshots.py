"""Publication of weights while the trainer trains.

    trainer's thread   copy(source) -> Snapshot, send --.                 train              wait_for
                                                        v                                       |
    event loop         kept snapshots --> moves? --> publisher.send_snapshot --> proven -- signal
                            ^              ^  ^
              no draw needs it: dropped    |  `-- a request came or ended, a replica came back (Seats.changed)
                                           `-- a draw ended (hold)

`hone.schedule.seats` decides which replicas take which version. One send happens at a time, because there is one
sender; replicas that are not part of it go on. A replica that restarts is empty, and gets its weights in the same way.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from hone.rollout.router import Router
from hone.schedule.seats import moves, needed
from hone.types import Metric, Metrics, Versions, merge_metrics
from hone.weights.snapshot import Snapshot, Source

LOOK_S = 0.5  # between two looks at the replicas while nothing happens


class SnapshotSender(Protocol):
    """Sender of a snapshot to some replicas, which serve it afterwards."""

    async def send_snapshot(self, snapshot: Snapshot, names: Collection[str]) -> Metrics: ...


class SnapshotPublication:
    """Keeps snapshots and brings each replica the version that open draws allow."""

    def __init__(self, router: Router, sender: SnapshotSender) -> None:
        self.is_needed: Callable[[int], bool] = lambda version: False  # also by a draw that is not open yet
        self._router = router
        self._sender = sender
        self._kept: dict[int, Snapshot] = {}
        self._held: Counter[Versions] = Counter()
        self._newest: Snapshot | None = None
        self._task: asyncio.Task[None] | None = None
        self._signal: asyncio.Future[None] | None = None
        self._failure: BaseException | None = None
        self._metrics: Metrics = {}
        self._times = _Times()
        router.seats.changed = self._notify

    def check(self) -> None:
        """Raise the error of a publication that failed since the last call."""
        if self._failure is not None:
            raise self._failure

    def copy(self, source: Source, version: int) -> Snapshot:
        """Copy the weights, on the trainer's thread."""
        began = time.perf_counter()
        self._newest = Snapshot.of(source, version, self._newest)
        self._times.copied += time.perf_counter() - began
        return self._newest

    # ------------------------------------------------------------------------------------------ on the event loop

    async def send(self, snapshot: Snapshot) -> None:
        """Keep a snapshot and send it as soon as replicas may take it."""
        self._kept[snapshot.version] = snapshot
        self._forget()  # here too, because a send takes a while and the trainer may publish again meanwhile
        if self._task is None:
            self._task = asyncio.create_task(self._keep_sending(), name="publication of weights")
        self._notify()

    @contextmanager
    def hold(self, versions: Versions) -> Iterator[None]:
        """Keep these versions available to one draw."""
        self._held[versions] += 1
        try:
            yield
        finally:
            self._held[versions] -= 1
            if not self._held[versions]:
                del self._held[versions]
            self._notify()

    async def reached(self, version: int, timeout_s: float) -> None:
        """Wait until every running replica has proven `version` or a newer one. Raises TimeoutError."""
        deadline, began = time.monotonic() + timeout_s, time.perf_counter()
        while not self._router.pool.has_proven(version):
            self.check()
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"weight version {version} was not proven by every rollout replica within {timeout_s:g} s: "
                    f"{self._router.pool.describe()}; open draws need the versions {sorted(self._held)}"
                )
            await self._wait(min(LOOK_S, timeout_s))
        self._times.waited += time.perf_counter() - began

    async def metrics(self) -> Metrics:
        """Figures of the rollout and of publications since the last call."""
        self.check()
        found, self._metrics = self._metrics, {}
        times, self._times = self._times, _Times()
        return merge_metrics(found, times.metrics(), self._router.metrics())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep_sending(self) -> None:
        """Send whatever replicas may take; a failure is kept for `check`, and ends every request without a seat."""
        try:
            while True:
                self._router.look()
                found = moves(self._router.pool.standings(), self._router.seats.waiting, self._held, self._kept)
                if found:
                    await self._send_to(found)
                else:
                    await self._wait(LOOK_S)
                self._forget()
        except Exception as error:  # noqa: BLE001  whatever it is, the trainer's next call raises it
            self._failure = error
            self._router.seats.refuse(error)
            self._notify()

    def _forget(self) -> None:
        """Drop the snapshots that no draw needs; one that is being sent stays until its send has ended."""
        for version in self._kept.keys() - needed([*self._held, *self._router.seats.waiting], self._kept):
            if not self.is_needed(version):
                del self._kept[version]

    async def _send_to(self, found: Mapping[str, int]) -> None:
        """Send the oldest version of those that replicas may take, to all of them that take it."""
        version = min(found.values())
        names = [name for name, one in found.items() if one == version]
        began = time.perf_counter()
        metrics = await self._sender.send_snapshot(self._kept[version], names)
        self._times.sent += time.perf_counter() - began
        self._metrics = merge_metrics(self._metrics, metrics)
        self._notify()

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
        whole = self.copied + self.sent
        if not whole:
            return {}
        hidden = max(0.0, self.sent - self.waited)
        return {"perf/publication_hidden_fraction": Metric.mean(hidden / whole, whole)}
