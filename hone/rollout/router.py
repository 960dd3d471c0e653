"""One `generate` over several replicas: who serves a request, and what happens when its replica stops in the middle.

    generate --[ waits here, in order: paused, every replica full, none serving ]--> a seat at one replica --> piece
       ^                                                                                                        |
       |   aborted inside, or its replica died: prompt + tokens so far are sent again, the pieces joined        |
       `--------------------------------------------------------------------------------------------------------'

A request waits for a seat, one of the `requests_per_replica` that a replica has at a time. Which free replica it gets
is decided in `placement`: the one that has its prefix, unless another has far less to do. Every piece has the deadline
`request_timeout_s`. A replica that died, or hangs (`heartbeat`), is started again and serves once it has the current
weights (`replicas`); when the last one is lost for good, every waiting request gets the error.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, TypeVar

from hone.deadline import SeatWait
from hone.processes.restarts import Restarts
from hone.rollout.base import Generating, ReplicaLost, ScoreAborted
from hone.rollout.builtin.requests import StopStrings
from hone.rollout.pending import PendingRequest
from hone.rollout.placement import RequestPlacement
from hone.rollout.prompt_scores import scorer_of, with_prompt_scores
from hone.rollout.replicas import Replica, ReplicaPool, RestoreFn, end_task, is_alive
from hone.rollout.settings import RolloutConfig
from hone.schedule.seats import fits
from hone.types import (
    Completion,
    GenerationRequest,
    Metric,
    Metrics,
    PauseMode,
    SamplingParams,
    Scored,
    StopReason,
    Versions,
)

WATCH_S = 0.5  # between two looks at the replicas' processes
HUNG = 1 / 4  # of `rollout.request_timeout_s`: a server without a sign of life for so long is restarted
RESTART_WINDOW_S = 3600.0  # only restarts within this time count for `rollout.max_restarts`

R = TypeVar("R")


class RequestLate(RuntimeError):
    """A replica did not answer a request before its deadline."""


class PoisonRequest(ValueError):
    """A request that cannot be served: replicas die of it, so it is not sent to another."""


class Seats:
    """Places at the replicas, and the requests that wait for one: a queue for each range of weight versions."""

    def __init__(self, pool: ReplicaPool, per_replica: int) -> None:
        self.paused = False
        self.changed: Callable[[], None] = lambda: None  # called after each `hand_out`
        self._pool = pool
        self._per_replica = per_replica
        self._waiting: dict[Versions | None, deque[_Waiting]] = {}
        self.placement = RequestPlacement()

    async def take(self, request: PendingRequest) -> Replica | None:
        """Wait for a seat; None if the request was aborted meanwhile."""
        seat: asyncio.Future[Replica | None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(request.request.versions, deque()).append((request, seat))
        self.hand_out()
        try:
            replica = await seat
        except asyncio.CancelledError:
            if seat.done() and not seat.cancelled() and (given := seat.result()) is not None:
                self.leave(given, request)  # it was given one in the same moment
            raise
        if replica is None or replica.state != "asleep":
            return replica
        self.leave(replica, request)  # it was lent, and began to rest in the same moment
        return await self.take(request)

    def leave(self, replica: Replica, request: PendingRequest) -> None:
        replica.end(request)
        self.hand_out()

    def hand_out(self) -> None:
        """Give free seats to those who wait, in order; called wherever a seat may have become free."""
        if self._pool.are_all_lost:
            self.refuse()
        for versions in list(self._waiting):
            self._hand_out(versions, self._waiting[versions])
            if not self._waiting[versions]:
                del self._waiting[versions]
        self.changed()

    def _hand_out(self, versions: Versions | None, waiting: deque[_Waiting]) -> None:
        held: list[_Waiting] = []
        while waiting and not self.paused:
            serving = [one for one in self._pool.serving if versions is None or fits(one.version, versions)]
            free = [one for one in serving if len(one.running) < self._per_replica]
            if not free:
                break
            request, seat = waiting.popleft()
            if seat.done():  # its caller was cancelled
                continue
            fit = [one for one in free if _may_join(request, one.running)]
            if not fit:
                held.append((request, seat))
                continue
            replica = self.placement.choose(request, fit)
            replica.begin(request)
            seat.set_result(replica)
        waiting.extendleft(reversed(held))

    @property
    def waiting(self) -> list[Versions]:
        """The versions that requests without a seat may be sampled from, each once, oldest request first."""
        ranges = (versions for versions, some in self._waiting.items() if any(not seat.done() for _, seat in some))
        return [versions for versions in ranges if versions is not None]

    @property
    def waits(self) -> bool:
        """Return whether a request has no seat."""
        return any(not seat.done() for some in self._waiting.values() for _, seat in some)

    def abort_waiting(self) -> None:
        for _, seat in self._take_all():
            seat.set_result(None)

    def refuse(self, error: BaseException | None = None) -> None:
        """Every waiting request gets the error; without one, that no replica serves, and why."""
        for _, seat in self._take_all():
            seat.set_exception(error or RuntimeError(f"no rollout replica is left ({self._pool.describe()})"))

    def _take_all(self) -> list[_Waiting]:
        found = [one for some in self._waiting.values() for one in some if not one[1].done()]
        self._waiting.clear()
        return found


_Waiting = tuple[PendingRequest, "asyncio.Future[Replica | None]"]


def _may_join(request: PendingRequest, running: set[PendingRequest]) -> bool:
    """Requests that were at two deaths share no replica with each other, so that the next death shows the cause."""
    return request.deaths < 2 or all(one.deaths < 2 for one in running)


class Router:
    """The verbs of a rollout engine, over replicas of one kind."""

    def __init__(
        self,
        replicas: Sequence[Generating],
        settings: RolloutConfig,
        tokenizer: Any = None,
        restart_window_s: float = RESTART_WINDOW_S,
    ) -> None:
        """`tokenizer` finds stop strings that begin in one piece of a completion and end in the next."""
        self.pool = ReplicaPool(
            replicas,
            lambda: Restarts(settings.max_restarts, restart_window_s),
            settings.request_timeout_s * HUNG,
            lambda: self.seats.hand_out(),
            owned=not settings.addresses,
        )
        self.seats = Seats(self.pool, settings.requests_per_replica)
        self._timeout_s = settings.request_timeout_s
        self._tokenizer = tokenizer
        self._open: set[str] = set()
        self._aborts = 0  # how often `abort_all` was called: a request aborted by it ends, by anything else it goes on
        self._watch: asyncio.Task[None] | None = None
        self._resent = 0
        self._closed = False

    @property
    def replicas(self) -> list[Any]:
        """The engines that can take weights now: alive, whether they serve yet or not."""
        return [one.engine for one in self.pool.members if one.is_up and is_alive(one.engine)]

    @property
    def serving(self) -> list[Any]:
        """The engines that requests go to: those that have proven the current weights."""
        return [one.engine for one in self.pool.serving]

    @property
    def weight_version(self) -> int:
        """The oldest version that a serving replica samples from; -1 if there is none."""
        return min((engine.weight_version for engine in self.serving), default=-1)

    def restore_with(self, restore: RestoreFn) -> None:
        """Say how a replica that was started anew gets the current weights."""
        self.pool.restore = restore

    # ---------------------------------------------------------------------------------------------- generating

    async def generate(self, request: GenerationRequest) -> Completion:
        """One completion, whatever happens to replicas meanwhile.

        Raises ValueError for a request that cannot be served, RequestLate naming the replica and the request,
        PoisonRequest for one that makes replicas die, and RuntimeError if no replica is left.
        """
        if request.sampling.prompt_logprobs is not None:
            return await with_prompt_scores(request, partial(self.score, versions=request.versions), self.generate)
        if request.id in self._open:
            raise ValueError(f"request {request.id!r} is already running")
        self._open.add(request.id)
        try:
            completion = await self._pieces(PendingRequest(request))
            self.seats.placement.saw(len(completion.token_ids))
            return completion
        finally:
            self._open.discard(request.id)

    async def _pieces(self, pending: PendingRequest) -> Completion:
        async def send(replica: Replica) -> Completion:
            found: Completion = await replica.engine.generate(pending.piece(replica.engine, most))
            return found

        aborts = self._aborts
        while self._aborts == aborts:
            most = pending.restrict()
            replica = await self._seat(pending)
            if replica is None:  # aborted while it waited
                break
            piece = await self._ask(replica, pending, send)
            is_span = False  # whether it ended only because its version samples no further token
            if piece is not None:
                before = len(pending.tokens)
                pending.add(piece, replica.name)
                if self._stopped_across(pending, before):
                    return pending.completion(StopReason.STOP)
                is_span = piece.stop_reason is StopReason.LENGTH and len(piece.token_ids) == most
                if piece.stop_reason is not StopReason.ABORTED and not is_span:
                    return pending.completion(piece.stop_reason)
                if len(pending.tokens) >= pending.request.sampling.max_tokens:  # aborted after its last token
                    return pending.completion(StopReason.LENGTH)
            self._resent += not is_span
            pending.sent += 1
        return pending.completion(StopReason.ABORTED)

    async def score(
        self, request_id: str, token_ids: tuple[int, ...], top_k: int = 0, versions: Versions | None = None
    ) -> Scored:
        """Compute the log-probs of a sequence's tokens by weights of `versions`; raises as `generate` does."""
        tokens = tuple(token_ids)
        request = PendingRequest(GenerationRequest(request_id, tokens, SamplingParams(0), versions=versions))
        self._open.add(request_id)
        aborts, piece_id = self._aborts, request_id
        try:
            while self._aborts == aborts and (replica := await self._seat(request)) is not None:
                if found := await self._ask(replica, request, partial(_score_once, piece_id, tokens, top_k)):
                    return found
                self._resent += 1
                piece_id += "+"  # a replica may still know the last one
            raise RuntimeError(f"request {request_id!r} was aborted")
        finally:
            self._open.discard(request_id)

    async def _seat(self, request: PendingRequest) -> Replica | None:
        self.look()
        with SeatWait():
            return await self.seats.take(request)

    async def _ask(
        self, replica: Replica, request: PendingRequest, send: Callable[[Replica], Awaitable[R]]
    ) -> R | None:
        """Return the replica's answer within the deadline; None if it died, and the request can be sent again."""
        life = replica.restarts.total
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                return await send(replica)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise RequestLate(
                f"replica {replica.name} did not answer request {request.id!r} within {self._timeout_s:g} s "
                f"(rollout.request_timeout_s)"
            ) from error
        except ReplicaLost as error:
            if replica.restarts.total == life:  # else it has been started again since, and that one is not lost
                self.pool.down(replica, str(error))
            if request.is_poison:
                raise PoisonRequest(
                    f"request {request.id!r} is not sent again: {request.deaths} replicas died with it, the "
                    f"last one was {replica.name} ({error})"
                ) from error
            return None
        finally:
            self.seats.leave(replica, request)

    def _stopped_across(self, joined: PendingRequest, before: int) -> bool:
        """Cut a completion after the token that completes a stop string which began in an earlier piece."""
        sampling = joined.request.sampling
        if not (before and sampling.stop and self._tokenizer is not None):
            return False
        strings = StopStrings(sampling.stop, self._tokenizer)
        for length in range(before + 1, len(joined.tokens) + 1):
            if strings.completed_by(joined.tokens[max(0, length - strings.window) : length]):
                joined.cut(length)
                return True
        return False

    # ------------------------------------------------------------------------------------------- dead and alive

    def look(self) -> None:
        """Notice the dead now, and keep looking while there are requests."""
        self.pool.look()
        if self._watch is None or self._watch.done():
            self._watch = asyncio.get_running_loop().create_task(self._keep_looking(), name="rollout router: watch")

    async def _keep_looking(self) -> None:
        """Look every WATCH_S while a request is open.

        Requests that wait while no replica serves or is being started (each is lost, or waits for a sync) get an error
        after `request_timeout_s`.
        """
        hopeless_s = 0.0
        while self._open and not self._closed:
            await asyncio.sleep(WATCH_S)
            if self._open and not self._closed:
                self.pool.look()
                self.pool.listen(WATCH_S, not self.seats.paused)
            hopeless_s = 0.0 if self.seats.paused or self.pool.can_recover else hopeless_s + WATCH_S
            if hopeless_s >= self._timeout_s:
                self.seats.refuse()
        self.pool.rest()

    def replica_failed(self, engine: Any, why: str) -> None:
        """A weight sync found a replica dead, or hung: it is started again as if a request had."""
        self.pool.down(self.pool.of(engine), why)

    def updating(self, engines: Collection[Any]) -> AbstractContextManager[None]:
        """While these receive weights they get no new request; afterwards, only those that `replica_serves` names."""
        return self.pool.updating(engines)

    def replica_serves(self, engine: Any) -> None:
        """A weight sync reached a replica: it has proved what it serves."""
        self.pool.proved(engine)
        self.seats.hand_out()

    async def revived(self) -> None:
        """Wait until nothing is being started; each start has its own deadline."""
        await self.pool.revived()

    # ------------------------------------------------------------------------------------ verbs for all replicas

    async def abort_all(self) -> None:
        """End every request now; each `generate` returns the tokens it has."""
        self._aborts += 1
        self.seats.abort_waiting()
        await self.pool.each("abort_all")

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop producing tokens. Requests that `abort` ends are sent again after `resume`: their callers do not see it.

        In every mode, requests that are not at a replica wait for `resume`.
        """
        self.seats.paused = True
        await self.pool.each("pause", mode)

    async def resume(self) -> None:
        await self.pool.each("resume")
        self.seats.paused = False
        self.seats.hand_out()

    async def sleep(self, level: int) -> None:
        await self.pool.each("sleep", level)

    async def wake_up(self, tags: tuple[str, ...] = ("weights", "kv_cache")) -> None:
        await self.pool.each("wake_up", tags)

    async def close(self) -> None:
        """End every server; requests that still wait get an error."""
        self._closed = True
        await end_task(self._watch)
        await self.pool.close()

    def metrics(self) -> Metrics:
        """The replicas' figures together, and what the router did, since the last call."""
        resent, self._resent = self._resent, 0
        return {**self.pool.metrics(), "rollout/requests_resent": Metric.sum(resent)}


async def _score_once(request_id: str, token_ids: tuple[int, ...], top_k: int, replica: Replica) -> Scored | None:
    """Return the score of one replica; None if it aborted the request."""
    with suppress(ScoreAborted):
        return await scorer_of(replica.engine, replica.name)(request_id, token_ids, top_k)
    return None


__all__ = ["PoisonRequest", "RequestLate", "RestoreFn", "Router"]
