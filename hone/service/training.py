"""Models in training: their commands arrive, wait for their turn, run, and leave a result.

    submit --registry--> Lane (order) --ready--> `run`, a model's commands one by one, tenants in turn --> Machine
                                                                                                 result --> Futures

A command is in the registry before its client hears of it, and so is its result. After an optimizer step the model's
state is written: a process that was killed starts from there and repeats the commands since, and has the same bits.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256

from hone.schedule.lanes import Lane, NestedTurns, Verdict
from hone.service.commands import ENDED, Commands, Turn
from hone.service.disk.checkpoints import Checkpoints
from hone.service.disk.registry import DISK_ERRORS, Checkpoint, CommandRow, Key, Model, Registry, Session
from hone.service.futures import Done, Outcome
from hone.service.models import TRAIN, Models
from hone.service.protocol.messages import CreateModel, LoadWeights
from hone.service.protocol.refusals import BadRequest, Busy, Gone, NotFound, Refused
from hone.service.protocol.wire import TrainingRequest
from hone.service.shared import Shared

LOG = logging.getLogger(__name__)
REMEMBERED = 256  # ended commands of a model whose repetition is recognised
HELD_S = 1.0  # between two looks at whether a tenant may go on
CREATE = "create"
REFUSED: dict[Verdict, tuple[type[Refused], str]] = {
    Verdict.CONFLICT: (BadRequest, "was used for another request"),
    Verdict.LATE: (Gone, "is over: it was given up, or its result is kept no more"),
    Verdict.CLOSED: (Gone, "came after the end of its session"),
    Verdict.FULL: (Busy, "is too far ahead of what runs"),
}


@dataclass(slots=True)
class _Open:
    """A model, and the order of its commands."""

    row: Model
    lane: Lane
    gap_since: float | None = None  # when the first of its commands began to wait for one that had not come
    unwritten: tuple[CommandRow, Done] | None = None  # a command whose end the disk had no room for


class Training:
    """All models of the service. Its methods run on HTTP's event loop."""

    def __init__(self, shared: Shared, checkpoints: Checkpoints, models: Models, commands: Commands) -> None:
        self._shared, self._registry, self._futures = shared, shared.registry, shared.futures
        self._checkpoints, self._opened, self._commands = checkpoints, models, commands
        self._models: dict[str, _Open] = {}
        self._turns = NestedTurns()  # of tenants, and of the models of each
        self._wake = asyncio.Event()
        self.parsed: dict[str, TrainingRequest] = {}  # of commands that wait, by request id

    # ------------------------------------------------------------------------------------------------- arrival

    def create(self, tenant: Key, session: Session, message: CreateModel | LoadWeights) -> str:
        """Take the first command of a new model: make it, or load it. Returns the request's id."""
        model_id = f"{session.id}:train:{message.model_seq_id}"
        if model_id not in self._models:
            lora = message.lora_config if isinstance(message, CreateModel) else None
            stored = json.dumps(None if lora is None else lora.model_dump(exclude={"type"}))
            if isinstance(message, LoadWeights):  # a path that is none fails when it is the command's turn
                found = self._registry.one(Checkpoint, "path = ? AND tenant = ?", (message.path, tenant.name))
                stored = "{}" if found is None else found.lora
            self._check_room(tenant, stored == "null")
            now = time.time()
            row = Model(
                id=model_id,
                tenant=tenant.name,
                session=session.id,
                seed=secrets.randbelow(1 << 31) if lora is None or lora.seed is None else lora.seed,
                lora=stored,
                metadata=json.dumps(message.user_metadata),
                created=now,
                used=now,
            )
            self._models[model_id] = _Open(row, Lane())
        body = message.model_dump_json(exclude_none=True).encode()
        kind = CREATE if isinstance(message, CreateModel) else "load_new"
        return self.submit(tenant, model_id, 0, kind, body)

    def _check_room(self, tenant: Key, whole: bool) -> None:
        most = tenant.models or self._shared.config.limits.models
        if sum(one.row.tenant == tenant.name for one in self._models.values()) >= most:
            raise BadRequest(
                f"{tenant.name} has {most} open models already, which is its limit; finish a session first (a session "
                f"without a client ends {self._shared.config.limits.session_s:g} s after its last heartbeat)"
            )
        if whole and self._models and self._shared.config.training.whole_weights:
            raise BadRequest("a model with all weights in training takes this service alone, and others are open")
        if any(one.row.lora == "null" for one in self._models.values()):
            raise BadRequest("a model with all weights in training takes this service alone; finish its session first")

    def submit(self, tenant: Key, model_id: str, number: int, kind: str, body: bytes, digest: str = "") -> str:
        """Take a command; returns its request's id. Raises Refused if it cannot be in its model's order."""
        found = self.model(tenant.name, model_id)
        digest = digest or sha256(kind.encode() + b" " + body).hexdigest()
        request_id = f"{model_id}:{number}"
        lane, verdict = found.lane.offer(number, digest)
        if verdict in REFUSED:
            refusal, why = REFUSED[verdict]
            raise refusal(f"seq_id {number} of {model_id} {why}")
        if verdict is Verdict.QUEUED:
            if number != found.lane.next:  # the one that the others wait for is always taken
                self._shared.make_room(tenant.name, len(body))
            with self._registry.together():
                if number == 0 and not found.lane.waiting:  # a new model, perhaps in the place of one that failed
                    self._registry.remove(CommandRow, "model = ?", (model_id,))
                    self._registry.put(found.row)
                self._registry.put(CommandRow(model_id, number, kind, digest, body))
            found.lane = lane
            self._futures.open(request_id, tenant.name, anew=True, size=len(body))
            self._wake.set()
        return request_id

    def submit_training(self, tenant: Key, parsed: TrainingRequest) -> str:
        """Take a forward_backward request."""
        digest = sha256(parsed.canonical).hexdigest()
        request_id = self.submit(tenant, parsed.model_id, parsed.seq_id, TRAIN, parsed.canonical, digest)
        if self.model(tenant.name, parsed.model_id).lane.waits(parsed.seq_id):
            self.parsed[request_id] = parsed
        return request_id

    def model(self, tenant: str, model_id: str) -> _Open:
        """A tenant's open model. Raises NotFound, or Gone if its session has ended."""
        found = self._models.get(model_id)
        if found is None or found.row.tenant != tenant:
            row = self._registry.one(Model, "id = ? AND tenant = ?", (model_id, tenant))
            if row is not None:
                raise Gone(f"the session of {model_id} has ended; load one of its checkpoints into a new model")
            raise NotFound(f"there is no model {model_id!r:.200}")
        return found

    # ------------------------------------------------------------------------------------------------- turns

    async def run(self) -> None:
        """Run the commands that are ready, one at a time, until cancelled."""
        while True:
            for one in list(self._models.values()):
                if one.unwritten is not None:
                    await self._end(one, *one.unwritten)
            models = self._next_round()
            if models:
                await self._execute(models)
            else:
                await self._something_new()

    async def _something_new(self) -> None:
        """Wait for a command; a second at most if a tenant has used up its tokens of the minute or the disk is full."""
        self._wake.clear()
        held = any(one.lane.ready is not None or one.unwritten is not None for one in self._models.values())
        with suppress(TimeoutError):
            async with asyncio.timeout(HELD_S if held else None):
                await self._wake.wait()

    def _next_round(self) -> list[_Open]:
        """The model whose turn it is, and those whose training commands may share its forward."""
        found: list[_Open] = []
        most = self._shared.config.training.max_tokens_per_microbatch

        def fits(one: _Open) -> bool:
            sizes = [_tokens(each.row, self.parsed.get(f"{each.row.id}:{each.lane.ready}")) for each in (*found, one)]
            return not found or (one not in found and 0 not in sizes and sum(sizes) <= most)

        while (model := self._next(fits)) is not None:
            found.append(model)
            if not self._shared.config.training.share_forwards:
                break
        return found

    def _next(self, fits: Callable[[_Open], bool]) -> _Open | None:
        """The model whose turn it is, of those that fit: tenants in turn, and the models of one tenant in turn."""
        ready: dict[str, list[str]] = {}
        for name, one in self._models.items():
            if one.lane.ready is not None and self._shared.quotas.has_room(one.row.tenant) and fits(one):
                ready.setdefault(one.row.tenant, []).append(name)
        self._turns, chosen = self._turns.pick(ready)
        return None if chosen is None else self._models[chosen]

    async def _execute(self, models: Sequence[_Open]) -> None:
        turns = [self._begin(one) for one in models]
        for model, turn, done in zip(models, turns, await self._commands.outcomes(turns), strict=True):
            await self._end(model, turn.command, done)

    def _begin(self, model: _Open) -> Turn:
        number = model.lane.ready
        assert number is not None
        model.lane, model.gap_since = model.lane.start(), None
        command = self._registry.one(CommandRow, "model = ? AND number = ?", (model.row.id, number))
        assert command is not None
        return Turn(model.row, command, self.parsed.pop(f"{model.row.id}:{number}", None))

    async def _end(self, model: _Open, command: CommandRow, done: Done) -> None:
        """Write the result of a command, and tell it.

        Without room on the disk the command fails, and the model's next one waits until that is written: the command
        would run again after a restart.
        """
        if model.lane.closed:  # meanwhile; what the command wrote is removed at the next start
            self._opened.close(command.model)
            done = ENDED
        number, no_model = command.number, command.number == 0 and bool(done.outcome.error) and not model.lane.closed
        try:
            with self._registry.together():
                _write_end(self._registry, command, done)
                if no_model:
                    self._registry.remove(Model, "id = ?", (command.model,))
        except DISK_ERRORS as error:
            if model.unwritten is None:  # or it is tried again
                LOG.exception("the end of command %d of %s cannot be written", number, command.model)
            done = Done(Outcome.failed(error))
            model.unwritten = command, done
            self._futures.resolve(f"{command.model}:{number}", done.outcome)
            self._opened.close(command.model)  # ahead of the disk
            self._checkpoints.remove_orphans()
            return
        model.unwritten = None
        done.after()
        model.row = self._registry.one(Model, "id = ?", (model.row.id,)) or model.row
        model.lane = model.lane.end().forget(number - REMEMBERED)
        self._futures.resolve(f"{command.model}:{number}", done.outcome)
        if no_model:
            model.lane, failed = model.lane.close()
            self._fail(command.model, failed, f"the model could not be made: {done.outcome.error}")
            self._models.pop(command.model, None)
            self._opened.close(command.model)

    # ---------------------------------------------------------------------------------------------- time and ends

    def give_up_gaps(self) -> None:
        """Fail the commands that have waited too long for one that never came."""
        now, limit = time.monotonic(), self._shared.config.limits.gap_s
        for name, one in self._models.items():
            if not one.lane.has_gap:
                one.gap_since = None
            elif one.gap_since is None:
                one.gap_since = now
            elif now > one.gap_since + limit:
                missing = one.lane.next
                lane, failed = one.lane.give_up()
                self._fail(
                    name, failed, f"seq_id {missing} did not come within {limit:g} s, and later requests wait for it"
                )
                one.lane = lane
                self._opened.close(name)  # a step among them drops gradients, a gradient lets the next step fail

    def end_session(self, session_id: str, why: str) -> None:
        """Close the models of a session: what waits fails, and their memory is given back."""
        ended = {name: one for name, one in self._models.items() if one.row.session == session_id}
        for name, one in ended.items():
            one.lane, failed = one.lane.close()
            with suppress(*DISK_ERRORS):  # the next start ends what the disk has no room for
                self._fail(name, failed, f"the session has ended: {why}")
                self._registry.change(Model, "closed = 1, state_folder = ''", "id = ?", (name,))
                self._registry.change(CommandRow, "body = NULL", "model = ?", (name,))
                self._checkpoints.discard(one.row.state_folder)
            self._models.pop(name, None)
            self._turns = self._turns.without(one.row.tenant, name)
            self._opened.close(name)

    def _fail(self, model_id: str, numbers: tuple[int, ...], error: str) -> None:
        """Fail commands that wait: all of them, or a process that is killed meanwhile would run the later ones."""
        failed = f"error = ?, category = 'user', ended = ?, body = CASE kind WHEN '{TRAIN}' THEN x'' END"
        try:
            with self._registry.together():
                for number in numbers:
                    values = (error, time.time(), model_id, number)
                    self._registry.change(CommandRow, failed, "model = ? AND number = ?", values)
                self._registry.drop_gradients(model_id)
        finally:
            for number in numbers:
                self.parsed.pop(f"{model_id}:{number}", None)
                self._futures.resolve(f"{model_id}:{number}", Outcome(error=error, category="user"))

    def forget_old(self) -> None:
        """Drop the results that nobody can ask for any more."""
        before = time.time() - self._shared.config.limits.result_s
        self._registry.change(CommandRow, "result = NULL", "ended > 0 AND ended < ? AND result IS NOT NULL", (before,))

    def restore(self) -> None:
        """Take up the models and commands that the registry has; results that are there can be asked for again."""
        for row in self._registry.find(Model, "closed = 0"):
            commands = self._registry.find(CommandRow, "model = ? ORDER BY number", (row.id,))
            self._models[row.id] = _Open(row, _lane_of(commands))
            for one in commands:
                request_id = f"{row.id}:{one.number}"
                if not one.ended or one.result is not None or one.error:
                    self._futures.open(request_id, row.tenant, size=len(one.body or b""))
                if one.ended and (one.result is not None or one.error):
                    self._futures.resolve(request_id, Outcome(one.result or b"", one.media, one.error, one.category))
        self._wake.set()


def _write_end(registry: Registry, command: CommandRow, done: Done) -> None:
    done.commit()
    out, now, body = done.outcome, time.time(), command.body if done.replays else None
    if command.kind == TRAIN and out.error:
        body = b""  # a restart has to know of it until the next step
    row = replace(
        command, body=body, result=out.body, media=out.media, error=out.error, category=out.category, ended=now
    )
    registry.put(row)
    if command.kind != TRAIN:
        registry.drop_gradients(command.model)
    old = (command.model, command.number - REMEMBERED)
    registry.remove(CommandRow, "model = ? AND number < ? AND body IS NULL", old)
    registry.change(Model, "used = ?", "id = ?", (now, command.model))


def _lane_of(commands: Sequence[CommandRow]) -> Lane:
    ended = [(one.number, one.digest) for one in commands if one.ended]
    waiting = tuple((one.number, one.digest) for one in commands if not one.ended)
    return Lane(next=ended[-1][0] + 1 if ended else 0, waiting=waiting, ended=tuple(ended[-REMEMBERED:]))


def _tokens(model: Model, request: TrainingRequest | None) -> int:
    """Tokens of a model's next command if it can share a forward with others; 0: it cannot."""
    if request is None or request.forward_only or model.lora == "null":
        return 0
    return sum(len(one.tokens) + 1 for one in request.data)
