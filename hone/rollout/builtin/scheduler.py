"""Runs the requests of the built-in engine: the queue, the running batch, and the task that drives them.

    run() --queue--> [ driver task: refill, prefill, one token per row, hand out what is finished ] --> Completion
                           ^ runs while there is work; gives the loop back after every step

Every `run` waits for a future that the driver sets; if the driver fails or is cancelled, each of them gets the error.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from typing import Protocol

import torch

from hone.rollout.admission import ReplicaState
from hone.rollout.builtin.batching import Counters, RunningBatch
from hone.rollout.builtin.requests import Request
from hone.types import Completion, Metric, Metrics, StopReason


class Merging(Protocol):
    """The weights, into which one adapter at a time is merged."""

    merged: str  # name of the adapter; empty: the policy's own

    def switch_to(self, adapter: str) -> None: ...


class Scheduler:
    """The requests of one engine. There is no thread: what happens depends only on the order of the calls."""

    def __init__(self, state: ReplicaState, batch: RunningBatch, weights: Merging) -> None:
        self.batch = batch
        self._state = state
        self._weights = weights
        self._queue: deque[Request] = deque()
        self._later: deque[Request] | None = None  # requests that arrive while `drain` lets the others end
        self._open: set[str] = set()  # ids of requests that wait or run
        self._driver: asyncio.Task[None] | None = None
        self._busy_s = 0.0
        self._ended: dict[StopReason, int] = dict.fromkeys(StopReason, 0)

    def check_new(self, request_id: str) -> None:
        """Raise ValueError if a request of this id waits or runs."""
        if request_id in self._open:
            raise ValueError(f"request {request_id!r} is already running on {self._state.replica}")

    async def run(self, request: Request) -> Completion:
        """Queue a request and wait for its completion; a caller that is cancelled takes it out."""
        self._open.add(request.request_id)
        (self._queue if self._later is None else self._later).append(request)
        request.seat.begin()
        self.wake()
        try:
            return await request.future
        finally:
            self._open.discard(request.request_id)
            request.seat.end()
            if request.row >= 0:  # the caller was cancelled
                self.batch.drop(request)
            if request.future.cancelled():
                request.seat.lost(len(request.tokens))
            for waiting in (self._queue, self._later):
                if waiting is not None and request in waiting:
                    waiting.remove(request)

    # ---------------------------------------------------------------------------------------------- the driver

    @property
    def has_work(self) -> bool:
        return self._state.can_generate and bool(self._queue or len(self.batch))

    def wake(self) -> None:
        """Start the driver if there is work; without work it needs no event loop. Called wherever work may appear."""
        if self.has_work and (self._driver is None or self._driver.done()):
            loop = asyncio.get_running_loop()
            self._driver = loop.create_task(self._drive(), name=f"rollout {self._state.replica}")
            self._driver.add_done_callback(self._driver_ended)

    async def _drive(self) -> None:
        """Step until there is no work or the replica is paused."""
        while self.has_work:
            began = time.perf_counter()
            self.step()
            self._busy_s += time.perf_counter() - began
            await asyncio.sleep(0)

    @torch.inference_mode()
    def step(self) -> None:
        """Fill free rows from the queue, and produce one token for each row."""
        if self._queue and not len(self.batch) and self._queue[0].sampling.adapter != self._weights.merged:
            self._weights.switch_to(self._queue[0].sampling.adapter)
        self.batch.refill(self._queue, self._weights.merged)
        for request, reason in self.batch.step():
            self._finish(request, reason)

    def _finish(self, request: Request, reason: StopReason) -> None:
        self._ended[reason] += 1
        request.finish(reason)

    def _driver_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self.fail_all("the engine's driver was cancelled", None)
        elif (error := task.exception()) is not None:
            self.fail_all(f"rollout replica {self._state.replica} failed: {error}", error)

    # --------------------------------------------------------------------------------------- all requests at once

    def fail_all(self, message: str, cause: BaseException | None) -> None:
        """Every waiting `run` gets the error; the engine is empty afterwards, and can take new requests."""
        for request in [*self.batch.abandon(), *self._take_waiting()]:
            request.fail(message, cause)
        self.batch.cache.release()

    def abort_all(self) -> None:
        """End every running and waiting request; each `run` returns the tokens it has."""
        for request in [*self.batch.evict(), *self._take_waiting()]:
            self._finish(request, StopReason.ABORTED)

    def _take_waiting(self) -> Iterator[Request]:
        for waiting in (self._queue, self._later or deque()):
            yield from waiting
            waiting.clear()

    def requeue_running(self) -> None:
        """Running requests go back to the front of the queue, in order, to be prefilled anew."""
        evicted = self.batch.evict()
        for request in evicted:
            request.seat.begin()
        self._queue.extendleft(reversed(evicted))

    async def drain(self) -> None:
        """Wait until all requests that are here now have ended; those that arrive later wait for `admit_later`."""
        self._later = deque() if self._later is None else self._later
        while self.has_work:
            await asyncio.sleep(0)

    def admit_later(self) -> None:
        """Queue the requests that arrived during `drain`."""
        self._queue.extend(self._later or ())
        self._later = None
        self.wake()

    def metrics(self) -> Metrics:
        """Figures since the last call."""
        counters, self.batch.counters = self.batch.counters, Counters()
        ended, self._ended = self._ended, dict.fromkeys(StopReason, 0)
        busy_s, self._busy_s = self._busy_s, 0.0
        found = {
            "rollout/tokens": Metric.sum(counters.tokens),
            "rollout/prefill_tokens": Metric.sum(counters.prefilled_tokens),
            "rollout/shared_prompt_tokens": Metric.sum(counters.shared_tokens),
            "rollout/cached_prompt_tokens": Metric.sum(counters.cached_tokens),
            "rollout/recomputed_tokens": Metric.sum(counters.recomputed_tokens),
            "rollout/requests": Metric.sum(sum(ended.values())),
            "rollout/aborted": Metric.sum(ended[StopReason.ABORTED]),
            "perf/rollout_busy_seconds": Metric.sum(busy_s),
            "rollout/kv_cache_bytes": Metric.max(self.batch.cache.bytes),
        }
        if counters.steps:
            found["rollout/batch_size"] = Metric.mean(counters.tokens / counters.steps, counters.steps)
            found["perf/rollout_tokens_per_s"] = Metric.mean(counters.tokens / busy_s, busy_s)
        return found
