"""The replicas behind a router: which of them serve, and what happens to one that dies.

serving --process ended, connection lost, hung--> down --start, restore weights--> serving
   |                                                |  `--no weights yet--> empty
   |                                                `--died or failed too often (max_restarts)--> lost
   `--weight sync (empty too)--> updating --it proved the new version--> serving
   |                                `--it did not--> empty
   |--`lending` takes it back: its requests are sent to others--> asleep --wakes--> serving, or empty
   `--`retire`: its requests are sent to others--> leaving --> gone          `add`: it has started --> empty
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any, Literal

from hone.processes.restarts import Restarts
from hone.rollout.base import Generating, ReplicaLost
from hone.rollout.heartbeat import Heartbeat
from hone.rollout.pending import PendingRequest
from hone.schedule.seats import Standing
from hone.tracking.base import note
from hone.types import Metric, Metrics, merge_metrics

LOG = logging.getLogger(__name__)

State = Literal["serving", "updating", "empty", "down", "lost", "leaving", "asleep"]
"""Of a replica; empty: it runs, without the current weights. See the picture above."""

RestoreFn = Callable[[Any], Awaitable[bool]]
"""Brings the current weights into one replica that was started anew; False: there are none yet, a sync will come."""


@dataclass(eq=False)
class Replica:
    """One engine, as the router sees it."""

    engine: Any  # RolloutEngine or ServerAdapter
    name: str
    restarts: Restarts
    heartbeat: Heartbeat | None = None  # of a server
    state: State = "serving"
    lent: bool = False  # serves on the trainer's device while the trainer waits
    running: set[PendingRequest] = field(default_factory=set)
    expected_tokens: float = 0.0  # that its requests will compute
    why: str = ""  # it is not serving
    revival: asyncio.Task[None] | None = None
    idle_s: float = 0.0  # without a request, since the last call of `idle`
    idle_since: float = field(default_factory=time.monotonic)  # while it has none
    silent_s: float = 0.0  # with requests and without a token, until the last call of `speed`

    def begin(self, request: PendingRequest) -> None:
        if not self.running:
            self.idle_s += time.monotonic() - self.idle_since
            note(self.name, "generate")
        self.running.add(request)
        self.expected_tokens += request.cost

    def end(self, request: PendingRequest) -> None:
        if request in self.running:
            self.running.discard(request)
            self.expected_tokens = self.expected_tokens - request.cost if self.running else 0.0
            self.idle_since = time.monotonic()
            if not self.running:
                note(self.name, "")

    def idle(self, now: float) -> float:
        """Seconds in which it had no request, from the last call until `now`."""
        found = self.idle_s
        if not self.running:
            found += now - self.idle_since
        self.idle_s, self.idle_since = 0.0, now
        return found

    def speed(self, tokens: float, open_s: float, seconds: float) -> float | None:
        """Tokens per second with a request, where it had one for `open_s` of so many seconds; None: unknown.

        Some servers count tokens when their answer ends, so no token is a speed of 0 from the second time in a row.
        """
        before, self.silent_s = self.silent_s, 0.0
        if tokens:
            return tokens / max(before + open_s, SHORTEST_S)
        if open_s <= seconds / 2:
            return None
        self.silent_s = before + open_s
        return 0.0 if before else None

    @property
    def version(self) -> int:
        """The weight version that it has proven; -1: none."""
        return int(self.engine.weight_version) if self.state == "serving" else -1

    @property
    def is_up(self) -> bool:
        return self.state in ("serving", "updating", "empty")


LOOK_S = 0.2  # between two looks whether a weight sync has ended
SHORTEST_S = 1e-9  # between two calls of `metrics`, so that shares are finite


class ReplicaPool:
    """All replicas of one rollout; those that die are started again."""

    def __init__(
        self,
        engines: Sequence[Generating],
        restarts: Callable[[], Restarts],
        hung_s: float,
        changed: Callable[[], None],
        owned: bool = True,
    ) -> None:
        """`changed` is called when a replica came back or was lost for good; `hung_s`: see `Heartbeat`; `owned`:
        whether this run starts the servers."""
        self._owned = owned
        self._restarts = restarts
        self._hung_s = hung_s
        self.members = [self._member(engine, number) for number, engine in enumerate(engines)]
        self.restore: RestoreFn | None = None
        self._changed = changed
        self._restarted = 0
        self._counted_since = time.monotonic()  # by `metrics`
        self._closed = False

    def add(self, engine: Generating, lent: bool = False) -> None:
        """A server that has started joins, without weights; a lent one sleeps."""
        joined = self._member(engine, len(self.members))
        joined.state, joined.lent = "asleep" if lent else "empty", lent
        self.members.append(joined)
        self._changed()

    def _member(self, engine: Generating, number: int) -> Replica:
        return Replica(engine, _name(engine, number), self._restarts(), _heartbeat(engine, self._hung_s))

    @property
    def serving(self) -> list[Replica]:
        """Those that have proven the current weights."""
        return [one for one in self.members if one.state == "serving"]

    @property
    def are_all_lost(self) -> bool:
        return all(one.state == "lost" for one in self.members)

    @property
    def can_recover(self) -> bool:
        """Return whether a replica serves, receives weights, or is being started."""
        return any(one.state in ("serving", "updating", "down") for one in self.members)

    def of(self, engine: Any) -> Replica:
        return next(one for one in self.members if one.engine is engine)

    def look(self) -> None:
        """Notice the replicas whose process has ended."""
        for one in self.members:
            if one.is_up and not is_alive(one.engine):
                self.down(one, "its process ended")

    def listen(self, seconds: float, may_compute: bool) -> None:
        """Notice the servers that hang; called every few moments while there are requests.

        A weight sync has deadlines of its own: a server that receives weights need not answer.
        """
        for one in self.members:
            if one.heartbeat is None:
                continue
            if one.state not in ("serving", "empty"):
                one.heartbeat.end()
            elif why := one.heartbeat.listen(seconds, may_compute and bool(one.running)):
                self.down(one, f"it hangs: {why}")

    def rest(self) -> None:
        """Listen no longer, until the next call of `listen`."""
        for one in self.members:
            if one.heartbeat is not None:
                one.heartbeat.end()

    @contextmanager
    def updating(self, engines: Collection[Any]) -> Iterator[None]:
        """While these receive weights they get no new request; afterwards, only if `proved` was called for them."""
        chosen = [one for one in self.members if one.engine in engines and one.is_up]
        for one in chosen:
            one.state = "updating"
            note(one.name, "sync")
        try:
            yield
        finally:
            for one in chosen:
                note(one.name, "generate" if one.running else "")
                if one.state == "updating":
                    one.state, one.why = "empty", "it did not prove the current weights"

    def proved(self, engine: Any) -> None:
        """A weight sync reached a replica."""
        replica = self.of(engine)
        if replica.state in ("updating", "empty"):
            replica.state = "serving"

    def down(self, replica: Replica, why: str) -> None:
        """Take a replica out of service and begin its revival."""
        if not replica.is_up or self._closed:
            return
        replica.state, replica.why = "down", why
        note(replica.name, "restart")
        _blame(replica.running)
        loop = asyncio.get_running_loop()
        replica.revival = loop.create_task(self._revive(replica), name=f"revive {replica.name}")

    async def _revive(self, replica: Replica) -> None:
        """Start a dead replica and give it weights; its start and the sync have deadlines of their own."""
        await end(replica)  # before any pause: a server that hangs still holds its requests
        while self._owned and not self._closed and replica.restarts.take():
            self._restarted += 1
            try:
                await asyncio.sleep(replica.restarts.pause_s)
                await replica.engine.close()
                await replica.engine.start()
                has_weights = self.restore is not None and await self.restore(replica.engine)
            except Exception as error:  # noqa: BLE001  whatever it is: kept in `why`, and not the end of the revival
                replica.why += f"; start {replica.restarts.total} failed: {type(error).__name__}: {error}"
                continue
            replica.restarts.worked()
            replica.state = "serving" if has_weights else "empty"
            break
        else:
            replica.state = "lost"
            again = f"it is not started again after rollout.max_restarts = {replica.restarts}"
            replica.why += f"; {again if self._owned else 'this run did not start it, and goes on without it'}"
            left = ", ".join(one.name for one in self.members if one.state != "lost") or "none"
            LOG.warning("rollout replica %s is lost: %s. Left: %s", replica.name, replica.why, left)
        note(replica.name, "")
        self._changed()

    async def revived(self) -> None:
        """Wait until nothing is being started; each start has its own deadline."""
        await asyncio.gather(*(one.revival for one in self.members if one.revival is not None))

    async def retire(self, name: str, timeout_s: float) -> None:
        """Take a replica away: its requests are aborted and go on at others, then it is ended.

        Raises ValueError for an unknown name and for the last replica, TimeoutError if weights are sent to it so long.
        """
        found = next((one for one in self.members if one.name == name), None)
        if found is None:
            raise ValueError(f"there is no replica {name!r}; there are {', '.join(one.name for one in self.members)}")
        if found.lent:
            raise ValueError(f"{name} is on the trainer's device (asynchrony.lend_trainer); it ends with the run")
        if not any(one.is_up for one in self.members if one is not found and not one.lent):
            raise ValueError(f"{name} is the last replica that runs; let another join first")
        try:
            await leave(found, "leaving", timeout_s)
        finally:
            await end(found)
            self.members.remove(found)
            self._changed()

    # ------------------------------------------------------------------------------------ versions that they serve

    def standings(self) -> list[Standing]:
        """The replicas that can take weights now, with the versions that their requests may be sampled from."""
        up = [one for one in self.members if one.state in ("serving", "empty") and is_alive(one.engine)]
        return [
            Standing(
                one.name,
                one.version,
                frozenset(versions for r in one.running if (versions := r.request.versions) is not None),
                one.lent,
            )
            for one in up
        ]

    def outdated(self) -> None:
        """Take every replica out of service until it proves the current weights."""
        for one in self.members:
            if one.state == "serving":
                one.state, one.why = "empty", "it has not proved the current weights yet"

    def has_proven(self, version: int) -> bool:
        """Return whether every running replica has proven this weight version or a newer one."""
        up = [one for one in self.members if one.is_up]
        return bool(up) and all(one.version >= version for one in up)

    def describe(self) -> str:
        """Each replica with its state, or the version that it has proven, or why it does not serve, for an error."""
        return "; ".join(
            f"{one.name} is {one.state} with {one.version}"
            if one.state == "serving"
            else f"{one.name} is {one.state}: {one.why}"
            for one in self.members
        )

    async def each(self, verb: str, *arguments: Any) -> None:
        """Call a verb on every replica that is up; one that turns out to be dead is revived, other failures raise."""
        called = [one for one in self.members if one.is_up]
        calls = (getattr(one.engine, verb)(*arguments) for one in called)
        for one, result in zip(called, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(result, ReplicaLost):
                self.down(one, str(result))
            elif isinstance(result, BaseException):
                raise result

    async def close(self) -> None:
        """End every server, and every start of one."""
        self._closed = True
        self.rest()
        for one in self.members:
            await end_task(one.revival)
            one.state, one.why = "lost", one.why or "closed"
        self._changed()
        closing = [one.engine.close() for one in self.members if hasattr(one.engine, "close")]
        failures = [one for one in await asyncio.gather(*closing, return_exceptions=True) if one is not None]
        if failures:
            raise failures[0]

    def metrics(self) -> Metrics:
        """The engines' figures together, and how many of them serve, since the last call."""
        restarted, self._restarted = self._restarted, 0
        now = time.monotonic()
        seconds, self._counted_since = now - self._counted_since, now
        replicas = [one for one in self.members if not one.lent]
        idle = [one.idle(now) for one in replicas]
        idle_s = mean(idle or [0.0])
        own = [one.engine.metrics() for one in replicas]
        figures = zip(replicas, own, idle, strict=True)
        lent = [one.engine.metrics() for one in self.members if one.lent]
        return {
            **merge_metrics(*own, *lent, *({"rollout/lent_tokens": one["rollout/tokens"]} for one in lent)),
            "perf/rollout_idle_s": Metric.sum(idle_s),
            "perf/rollout_utilisation": Metric.mean(1 - idle_s / max(seconds, idle_s, SHORTEST_S), seconds),
            "rollout/replicas_serving": Metric.min(sum(one.state in ("serving", "updating") for one in self.members)),
            "rollout/replica_restarts": Metric.sum(restarted),
            **_slowest([one.speed(found["rollout/tokens"].value, seconds - s, seconds) for one, found, s in figures]),
        }


def _slowest(speeds: Sequence[float | None]) -> Metrics:
    """The replica with the lowest speed, and its share of the others' median; empty if fewer than two speeds are known.

    Speeds are by the time with requests here: a server's own clock misses a process that is stopped.
    """
    known = {number: speed for number, speed in enumerate(speeds) if speed is not None}
    if len(known) < 2 or not any(known.values()):
        return {}
    slowest = min(known, key=lambda number: known[number])
    share = known[slowest] / max(median(one for number, one in known.items() if number != slowest), SHORTEST_S)
    return {"perf/slowest_replica": Metric.max(slowest), "perf/slowest_replica_speed": Metric.min(share)}


def _blame(running: set[PendingRequest]) -> None:
    """Count a death for the requests that a replica had; one that alone has seen the most before is the cause.

    Requests that have seen as many as others are tried again apart from each other (`Seats`), which tells them apart.
    """
    most = max((one.deaths for one in running), default=0)
    suspects = [one for one in running if one.deaths == most]
    if most and len(suspects) == 1:
        suspects[0].is_poison = True
    for one in running:
        one.deaths += 1


async def leave(replica: Replica, state: State, timeout_s: float) -> bool:
    """Give a replica no more requests, and abort what it has; returns whether it was up.

    Raises TimeoutError, with nothing changed, if weights are sent to it so long.
    """
    async with asyncio.timeout(timeout_s):
        while replica.state == "updating":
            await asyncio.sleep(LOOK_S)
    was_up, replica.state = replica.is_up, state
    await end_task(replica.revival)
    try:
        if was_up:
            await replica.engine.abort_all()
    except (ReplicaLost, TimeoutError) as error:  # its requests notice its end
        replica.why = str(error)
    finally:
        if replica.heartbeat is not None:
            replica.heartbeat.end()
    return was_up


async def end(replica: Replica) -> None:
    """End a server; a failure is kept in `why`."""
    try:
        await replica.engine.close()
    except Exception as error:  # noqa: BLE001  the start that follows ends it again, and fails if it cannot
        replica.why += f"; its end failed: {type(error).__name__}: {error}"


async def end_task(task: asyncio.Task[None] | None) -> None:
    """Cancel a task of this event loop and wait for its end."""
    if task is not None and not task.done() and task.get_loop() is asyncio.get_running_loop():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def is_alive(engine: Any) -> bool:
    """Return whether a server's process runs; an engine in this process lives as long as this process."""
    return bool(getattr(engine, "alive", True))


def _heartbeat(engine: Any, hung_s: float) -> Heartbeat | None:
    """An engine in this process has none: it cannot hang while this process goes on."""
    return Heartbeat(engine, hung_s) if hasattr(engine, "beat") else None


def _name(engine: Any, number: int) -> str:
    for attribute in ("name", "replica"):
        if isinstance(found := getattr(engine, attribute, None), str):
            return found
    return f"replica-{number}"


__all__ = ["Replica", "ReplicaPool", "RestoreFn", "end", "end_task", "is_alive", "leave"]
