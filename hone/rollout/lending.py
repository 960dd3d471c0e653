"""A server on the trainer's device that generates while the trainer waits for answers (`asynchrony.lend_trainer`).

    trainer's thread     wait for answers ------------------------------- all there --> train
                            | wake                                            | rest
    event loop              empty --weights--> serving: takes its share -->   requests go on at others --> asleep

It is one replica more, which sleeps while the trainer trains. Awake, it gets weights and requests like every other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress

from hone.rollout.base import ReplicaLost, ServerAdapter
from hone.rollout.pending import PendingRequest
from hone.rollout.replicas import Replica, end, end_task, leave
from hone.rollout.router import Router
from hone.schedule.seats import fits
from hone.types import Metric, Metrics

LOOK_S = 0.05  # between two looks whether it has weights


class LentServer:
    """One server of a router, awake between `wake` and `rest`. All coroutines run on the router's event loop."""

    def __init__(self, router: Router, server: ServerAdapter, level: int, timeout_s: float) -> None:
        """`level` of its sleep; `timeout_s` bounds the wait for a weight sync that it is part of."""
        self._router = router
        self._server = server
        self._level = level
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._sharing: asyncio.Task[None] | None = None
        self._woken: float | None = None
        self._awake_s = 0.0

    async def start(self) -> None:
        """Start the server and have it sleep, as a member of the router. Raises ServerFailed."""
        await self._server.start()
        await self._server.sleep(self._level)
        self._router.pool.add(self._server, lent=True)

    async def wake(self) -> None:
        """Have it serve. A server that has died is started again, `rollout.max_restarts` times at most."""
        async with self._turn:
            self._woken = time.monotonic()
            await self._begin()
            self._sharing = asyncio.create_task(self._share(), name="share of the lent server")

    async def rest(self) -> None:
        """Have it sleep; its requests go on at the other replicas. Raises TimeoutError if weights are sent so long."""
        async with self._turn:
            await end_task(self._sharing)
            if self._sharing is not None and not self._sharing.cancelled():
                await self._sharing  # raises what it raised
            self._sharing = None
            await self._stop()
            if self._woken is not None:
                self._awake_s += time.monotonic() - self._woken
            self._woken = None

    def metrics(self) -> Metrics:
        """Figures since the last call."""
        awake_s, self._awake_s = self._awake_s, 0.0
        return {"perf/lent_s": Metric.sum(awake_s)}

    async def _begin(self) -> None:
        pool = self._router.pool
        replica = pool.of(self._server)
        if replica.state != "asleep":
            return
        try:
            if self._server.alive:
                await self._server.wake_up()
                replica.state = "serving" if self._server.weight_version >= 0 else "empty"
                self._router.seats.hand_out()
                return
        except (ReplicaLost, TimeoutError) as error:
            replica.why = str(error)
        replica.state = "empty"
        pool.down(replica, replica.why or "its process ended")

    async def _stop(self) -> None:
        replica = self._router.pool.of(self._server)
        if replica.state in ("asleep", "lost"):
            return
        try:
            was_up = await leave(replica, "asleep", self._timeout_s)
        except TimeoutError as error:
            raise TimeoutError(
                f"the trainer needs the device of {replica.name} back (asynchrony.lend_trainer), and weights are still "
                f"being sent to it after {self._timeout_s:g} s (weights.timeout_s)"
            ) from error
        try:
            if was_up and self._server.alive:
                await self._server.sleep(self._level)
                return
        except (ReplicaLost, TimeoutError) as error:
            replica.why = str(error)
        await end(replica)  # half started, or dead: `wake` starts it again

    async def _share(self) -> None:
        """Take over a part of what the others run, when it has weights and no request waits for a seat."""
        lent = self._router.pool.of(self._server)
        while lent.state != "serving":  # until `rest` cancels this
            await asyncio.sleep(LOOK_S)
        if self._router.seats.waits:
            return
        others = [one for one in self._router.pool.serving if one is not lent]
        for other in others:
            moved = _part(other, lent, len(others) + 1)
            if moved:
                self._router.seats.placement.move(moved, lent)
                with suppress(ReplicaLost, TimeoutError):  # its requests notice that it has died or hangs
                    await other.engine.abort_all()  # they are sent again: these to `lent`, the rest to where they were


def _part(other: Replica, lent: Replica, parts: int) -> Sequence[PendingRequest]:
    """One of `parts` parts of the requests of a replica, those that the weights of `lent` may answer: whole prompts."""
    able = [one for one in other.running if fits(lent.version, one.request.versions)]
    prompts = sorted({one.request.tokens for one in able})[::parts] if len(able) >= parts else []
    return [one for one in able if one.request.tokens in prompts]


__all__ = ["LentServer"]
