"""One `generate` over several replicas: who serves a request, and what happens when its replica stops in the middle.

    generate --[ waits here, in order: paused, every replica full, none serving ]--> a seat at one replica --> piece
       ^                                                                                                        |
       |   aborted inside, or its replica died: prompt + tokens so far are sent again, the pieces joined        |
       `--------------------------------------------------------------------------------------------------------'
    [ watch: while there are requests, looks at each replica's process ] --dead--> [ revive: start, restore weights ]

A request waits for a seat (a place among the requests that one replica has at a time); whoever leaves one, resumes or
revives hands it on. Turns of one trajectory go to the replica that has their prefix, everything else to the one with
the fewest requests. Every piece has the deadline `request_timeout_s`; a replica that died is started again
`max_restarts` times and serves only after `restore` has given it the current weights. When the last one is lost for
good, everybody who waits gets the error.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hone.data.routes import Routes, joined_routes
from hone.rollout.base import Generating, PauseMode, ReplicaLost
from hone.rollout.requests import StopStrings
from hone.rollout.settings import RolloutConfig
from hone.types import Completion, Image, Metric, Metrics, SamplingParams, StopReason, merge_metrics

RestoreFn = Callable[[Any], Awaitable[bool]]
"""Brings the current weights into one replica that was started anew; False: there are none yet, a sync will come."""

WATCH_S = 0.5  # between two looks at the replicas' processes
HOMES = 65_536  # trajectories whose replica is remembered; the longest unused is forgotten


class RequestLate(RuntimeError):
    """A replica did not answer a request before its deadline."""


@dataclass(eq=False)
class _Seat:
    """A replica, as the router sees it."""

    engine: Any  # RolloutEngine or ServerAdapter
    name: str
    running: int = 0
    state: str = "serving"  # serving, empty (alive, but without the current weights), down (starts again), lost
    restarts: int = 0
    why: str = ""  # it is not serving
    revival: asyncio.Task[None] | None = None


@dataclass(eq=False)
class _Wait:
    """A request that waits for a seat; over without one: it was aborted."""

    trajectory: str
    over: asyncio.Future[None]
    seat: _Seat | None = None


@dataclass
class _Joined:
    """The pieces of one completion."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: Routes | None = None
    prompt: int = 0  # its length
    sent: int = 0  # how often it was sent again

    def add(self, piece: Completion) -> None:
        self.tokens += piece.token_ids
        self.logprobs += piece.logprobs
        self.versions += piece.weight_versions
        self.routes = joined_routes(self.routes, piece.routed_experts)

    def cut(self, length: int) -> None:
        del self.tokens[length:], self.logprobs[length:], self.versions[length:]

    def completion(self, request_id: str, reason: StopReason) -> Completion:
        tokens, logprobs, versions = tuple(self.tokens), tuple(self.logprobs), tuple(self.versions)
        known = max(self.prompt + len(tokens) - 1, 0)  # a cut leaves fewer than were computed
        routes = None if self.routes is None else self.routes[:known]
        return Completion(request_id, tokens, logprobs, versions, reason, routes)


class Router:
    """The verbs of a rollout engine, over replicas of one kind."""

    def __init__(self, replicas: Sequence[Generating], settings: RolloutConfig, tokenizer: Any = None) -> None:
        """`tokenizer` finds stop strings that begin in one piece of a completion and end in the next."""
        self._seats = [_Seat(engine, _name(engine, number)) for number, engine in enumerate(replicas)]
        self._per_replica = settings.requests_per_replica
        self._timeout_s = settings.request_timeout_s
        self._max_restarts = settings.max_restarts
        self._tokenizer = tokenizer
        self._restore: RestoreFn | None = None
        self._waiting: deque[_Wait] = deque()
        self._open: set[str] = set()
        self._homes: OrderedDict[str, _Seat] = OrderedDict()
        self._paused = False
        self._aborts = 0  # how often `abort_all` was called: a request aborted by it ends, by anything else it goes on
        self._watch: asyncio.Task[None] | None = None
        self._resent = self._restarted = 0
        self._closed = False

    @property
    def replicas(self) -> list[Any]:
        """The engines that can take weights now: alive, whether they serve yet or not."""
        return [seat.engine for seat in self._seats if seat.state in ("serving", "empty") and _alive(seat.engine)]

    @property
    def serving(self) -> list[Any]:
        """The engines that requests go to: those that have proven the current weights."""
        return [seat.engine for seat in self._seats if seat.state == "serving"]

    @property
    def weight_version(self) -> int:
        """The oldest version that a serving replica samples from; -1 if there is none."""
        return min((seat.engine.weight_version for seat in self._seats if seat.state == "serving"), default=-1)

    def restore_with(self, restore: RestoreFn) -> None:
        """Say how a replica that was started anew gets the current weights."""
        self._restore = restore

    # ---------------------------------------------------------------------------------------------- generating

    async def generate(
        self, request_id: str, token_ids: tuple[int, ...], sampling: SamplingParams, images: tuple[Image, ...] = ()
    ) -> Completion:
        """One completion, whatever happens to replicas meanwhile.

        Raises ValueError for a request that cannot be served, RequestLate naming the replica and the request, and
        RuntimeError if no replica is left.
        """
        if request_id in self._open:
            raise ValueError(f"request {request_id!r} is already running")
        self._open.add(request_id)
        try:
            return await self._pieces(request_id, tuple(token_ids), sampling, *((images,) if images else ()))
        finally:
            self._open.discard(request_id)

    async def _pieces(
        self, request_id: str, prompt: tuple[int, ...], sampling: SamplingParams, *images: tuple[Image, ...]
    ) -> Completion:
        joined, aborts = _Joined(prompt=len(prompt)), self._aborts
        piece_id = request_id
        while self._aborts == aborts:
            seat = await self._seat(request_id.rpartition("/")[0])
            if seat is None:  # aborted while it waited
                break
            life = seat.restarts
            try:
                rest = _rest(sampling, joined, seat)
                piece = await self._ask(seat, piece_id, (*prompt, *joined.tokens), rest, *images)
            except ReplicaLost as error:
                if seat.restarts == life:  # else it has been started again since, and that one is not lost
                    self._down(seat, str(error))
            else:
                before = len(joined.tokens)
                joined.add(piece)
                ended = self._stopped_across(joined, before, sampling)
                if ended or piece.stop_reason is not StopReason.ABORTED:
                    return joined.completion(request_id, StopReason.STOP if ended else piece.stop_reason)
            finally:
                self._leave(seat)
            self._resent += 1
            joined.sent += 1
            piece_id = f"{request_id}+{joined.sent}"  # a replica may still know the last one
        return joined.completion(request_id, StopReason.ABORTED)

    async def _ask(
        self, seat: _Seat, request_id: str, ids: tuple[int, ...], sampling: SamplingParams, *images: tuple[Image, ...]
    ) -> Completion:
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                piece: Completion = await seat.engine.generate(request_id, ids, sampling, *images)
                return piece
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise RequestLate(
                f"replica {seat.name} did not answer request {request_id!r} within {self._timeout_s:g} s "
                f"(rollout.request_timeout_s)"
            ) from error

    def _stopped_across(self, joined: _Joined, before: int, sampling: SamplingParams) -> bool:
        """Cut a completion after the token that completes a stop string which began in an earlier piece."""
        if not (before and sampling.stop and self._tokenizer is not None):
            return False
        strings = StopStrings(sampling.stop, self._tokenizer)
        for length in range(before + 1, len(joined.tokens) + 1):
            if strings.completed_by(joined.tokens[:length]):
                joined.cut(length)
                return True
        return False

    # --------------------------------------------------------------------------------------------------- seats

    async def _seat(self, trajectory: str) -> _Seat | None:
        """A seat for a request of `trajectory`; None if it was aborted while it waited."""
        self.look()
        wait = _Wait(trajectory, asyncio.get_running_loop().create_future())
        self._waiting.append(wait)
        self._hand_out()
        try:
            await wait.over
        except asyncio.CancelledError:
            self._leave(wait.seat)  # if it was given one in the same moment
            raise
        return wait.seat

    def _hand_out(self) -> None:
        """Give free seats to those who wait, in order; called wherever a seat may have become free."""
        if all(seat.state == "lost" for seat in self._seats):
            self._refuse()
        while self._waiting and not self._paused:
            free = [s for s in self._seats if s.state == "serving" and s.running < self._per_replica]
            if not free:
                return
            wait = self._waiting.popleft()
            if wait.over.done():  # its caller was cancelled
                continue
            home = self._homes.get(wait.trajectory)
            wait.seat = home if home is not None and home in free else min(free, key=lambda one: one.running)
            self._remember(wait.trajectory, wait.seat)
            wait.seat.running += 1
            wait.over.set_result(None)

    def _remember(self, trajectory: str, seat: _Seat) -> None:
        if not trajectory:
            return
        self._homes[trajectory] = seat
        self._homes.move_to_end(trajectory)
        if len(self._homes) > HOMES:
            self._homes.popitem(last=False)

    def _leave(self, seat: _Seat | None) -> None:
        if seat is not None:
            seat.running -= 1
            self._hand_out()

    def _refuse(self) -> None:
        whole = "; ".join(f"{seat.name}: {seat.why}" for seat in self._seats)
        while self._waiting:
            wait = self._waiting.popleft()
            if not wait.over.done():
                wait.over.set_exception(RuntimeError(f"no rollout replica is left ({whole})"))

    # ------------------------------------------------------------------------------------------- dead and alive

    def look(self) -> None:
        """Notice the dead now, and keep looking while there are requests."""
        for seat in self._seats:
            if seat.state in ("serving", "empty") and not _alive(seat.engine):
                self._down(seat, "its process ended")
        if self._watch is None or self._watch.done():
            self._watch = asyncio.get_running_loop().create_task(self._keep_looking(), name="rollout router: watch")

    async def _keep_looking(self) -> None:
        """Looks every WATCH_S; ends when no request is open.

        Who waits while no replica serves or is being started (each is lost, or waits for a sync) gets an error after
        `request_timeout_s`.
        """
        hopeless_s = 0.0
        while self._open and not self._closed:
            await asyncio.sleep(WATCH_S)
            if self._open and not self._closed:
                self.look()
            hopeful = self._paused or any(seat.state in ("serving", "down") for seat in self._seats)
            hopeless_s = 0.0 if hopeful else hopeless_s + WATCH_S
            if hopeless_s >= self._timeout_s:
                self._refuse()

    def _down(self, seat: _Seat, why: str) -> None:
        """Take a replica out of service and begin its revival."""
        if seat.state in ("down", "lost") or self._closed:
            return
        seat.state, seat.why = "down", why
        seat.revival = asyncio.get_running_loop().create_task(self._revive(seat), name=f"revive {seat.name}")

    async def _revive(self, seat: _Seat) -> None:
        """Start a dead replica and give it weights; its start and the sync have deadlines of their own."""
        while seat.restarts < self._max_restarts and not self._closed:
            seat.restarts += 1
            self._restarted += 1
            try:
                await seat.engine.close()
                await seat.engine.start()
                served = self._restore is not None and await self._restore(seat.engine)
            except Exception as error:  # noqa: BLE001  whatever it is: told in `why`, and not the end of the revival
                seat.why = f"{seat.why}; start {seat.restarts} failed: {type(error).__name__}: {error}"
                continue
            seat.state = "serving" if served else "empty"
            break
        else:
            seat.state = "lost"
            seat.why = f"{seat.why}; rollout.max_restarts = {self._max_restarts} is used up"
        self._hand_out()

    def replica_failed(self, engine: Any, why: str) -> None:
        """Somebody else found a replica dead (a weight sync): it is started again as if a request had."""
        for seat in self._seats:
            if seat.engine is engine:
                self._down(seat, why)

    def replica_serves(self, engine: Any) -> None:
        """A weight sync reached a replica that was waiting for one."""
        for seat in self._seats:
            if seat.engine is engine and seat.state == "empty":
                seat.state = "serving"
        self._hand_out()

    async def revived(self) -> None:
        """Wait until nothing is being started; each start has its own deadline."""
        tasks = [seat.revival for seat in self._seats if seat.revival is not None]
        if tasks:
            await asyncio.gather(*tasks)

    # ------------------------------------------------------------------------------------ verbs for all replicas

    async def abort_all(self) -> None:
        """End every request now; each `generate` returns the tokens it has."""
        self._aborts += 1
        while self._waiting:
            wait = self._waiting.popleft()
            if not wait.over.done():
                wait.over.set_result(None)
        await self._each("abort_all")

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop producing tokens. Requests that `abort` ends are sent again after `resume`: their callers do not see it.

        In every mode, requests that are not at a replica wait for `resume`.
        """
        self._paused = True
        await self._each("pause", mode)

    async def resume(self) -> None:
        await self._each("resume")
        self._paused = False
        self._hand_out()

    async def sleep(self, level: int) -> None:
        await self._each("sleep", level)

    async def wake_up(self, tags: tuple[str, ...] = ("weights", "kv_cache")) -> None:
        await self._each("wake_up", tags)

    async def _each(self, verb: str, *arguments: Any) -> None:
        """Call a verb on every replica that is up; one that turns out to be dead is revived, other failures raise."""
        seats = [seat for seat in self._seats if seat.state in ("serving", "empty")]
        done = await asyncio.gather(*(getattr(seat.engine, verb)(*arguments) for seat in seats), return_exceptions=True)
        for seat, result in zip(seats, done, strict=True):
            if isinstance(result, ReplicaLost):
                self._down(seat, str(result))
            elif isinstance(result, BaseException):
                raise result

    async def close(self) -> None:
        """End every server; whoever still waits gets an error."""
        self._closed = True
        for task in [self._watch, *(seat.revival for seat in self._seats)]:
            if task is not None and not task.done() and task.get_loop() is asyncio.get_running_loop():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        for seat in self._seats:
            seat.state, seat.why = "lost", seat.why or "closed"
        self._refuse()
        closing = [seat.engine.close() for seat in self._seats if hasattr(seat.engine, "close")]
        failures = [one for one in await asyncio.gather(*closing, return_exceptions=True) if one is not None]
        if failures:
            raise failures[0]

    def metrics(self) -> Metrics:
        """The replicas' figures together, and what the router did, since the last call."""
        resent, self._resent = self._resent, 0
        restarted, self._restarted = self._restarted, 0
        return {
            **merge_metrics(*(seat.engine.metrics() for seat in self._seats)),
            "rollout/replicas_serving": Metric.min(sum(seat.state == "serving" for seat in self._seats)),
            "rollout/replica_restarts": Metric.sum(restarted),
            "rollout/requests_resent": Metric.sum(resent),
        }


def _name(engine: Any, number: int) -> str:
    for attribute in ("name", "replica"):
        if isinstance(found := getattr(engine, attribute, None), str):
            return found
    return f"replica-{number}"


def _alive(engine: Any) -> bool:
    return bool(getattr(engine, "alive", True))  # one in this process lives as long as we do


def _rest(sampling: SamplingParams, joined: _Joined, seat: _Seat) -> SamplingParams:
    """What is still to be sampled: fewer tokens, and another random stream where the same one would begin anew."""
    if not joined.tokens:
        return sampling
    left = replace(sampling, max_tokens=sampling.max_tokens - len(joined.tokens))
    if seat.engine.positional_seed:
        return left
    text = f"{sampling.seed}/{len(joined.tokens)}".encode()
    return replace(left, seed=int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1)


__all__ = ["RequestLate", "RestoreFn", "Router"]
