"""The commands of a model, and their results, rows and files.

Files come first, then the rows in one transaction with the command's result (`Done.commit`), then what is not needed
any more goes (`Done.after`). A kill between any two of them loses nothing that was confirmed.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hone.service.disk.checkpoints import EXTERNAL, SAMPLING, STATE, Checkpoints, Saving, flush
from hone.service.disk.registry import NOBODY, Checkpoint, CommandRow, Key, Model, SnapshotRow
from hone.service.futures import JSON, PROTOBUF, Done, Outcome
from hone.service.models import TRAIN, Models
from hone.service.protocol import messages
from hone.service.protocol.refusals import BadRequest, Refused
from hone.service.protocol.wire import TrainingRequest, read_training
from hone.service.shared import Shared
from hone.workers.tenants.training import AdamStep, TenantModel
from hone.workers.tenants.work import Work

LOG = logging.getLogger(__name__)
R = TypeVar("R")
ENDED = Done(Outcome(error="the session has ended", category="user"))


@dataclass(frozen=True, slots=True)
class Turn:
    """A command whose turn it is."""

    model: Model
    command: CommandRow
    parsed: TrainingRequest | None  # of a training command that came since the start


def reply(kind: str, **fields: Any) -> Outcome:
    """A JSON result."""
    return Outcome(json.dumps({"type": kind, **fields}).encode(), JSON)


class Commands:
    """Runs commands."""

    def __init__(self, shared: Shared, checkpoints: Checkpoints, models: Models, retire: Callable[[str], None]) -> None:
        """`retire` is called with the folder of a snapshot that is replaced, for the rollout to forget it."""
        self._shared, self._registry, self._machine = shared, shared.registry, shared.machine
        self._checkpoints, self._models, self._retire_in_rollout = checkpoints, models, retire
        self._verbs: dict[str, Callable[[Model, CommandRow], Awaitable[Done]]] = {
            "create": self._create,
            "load_new": self._load_new,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_for_sampling,
            "save_weights_external": self._save_external,
            "load_weights": self._load_weights,
        }

    async def outcomes(self, turns: Sequence[Turn]) -> list[Done]:
        """Run one command, or training commands of several models as far as they can share a forward.

        Every failure becomes a result.
        """
        if len(turns) == 1:
            return [await self._settled(turns[0], self._run)]
        prepared = [await self._settled(turn, self._prepared) for turn in turns]
        ready = [(turn, one) for turn, one in zip(turns, prepared, strict=True) if isinstance(one, Work)]
        try:
            works = [(turn.model.tenant, turn.model.id, work) for turn, work in ready]
            bodies = await self._machine.call(self._machine.train_together, works)
            replies = iter([ENDED if body is None else Done(Outcome(body, PROTOBUF), replays=True) for body in bodies])
        except Exception:
            LOG.exception("a forward of %d models failed: their commands run one by one", len(ready))
            for turn, _ in ready:
                self._models.close(turn.model.id)  # some of the gradients may have been added
            replies = iter([await self._settled(turn, partial(self._trained, work=work)) for turn, work in ready])
        return [one if isinstance(one, Done) else next(replies) for one in prepared]

    async def _settled(self, turn: Turn, run: Callable[[Turn], Awaitable[R]]) -> R | Done:
        """The result of `run`, or of its failure."""
        model, command = turn.model, turn.command
        try:
            if command.kind not in ("create", "load_new"):
                await self._models.ensure_open(model, command)
            return await run(turn)
        except (Refused, ValueError) as error:
            found = Outcome.failed(error)
            if command.kind == "optim_step" and model.id in self._machine.models:
                await self._models.drop_gradients(model.id)  # as every step that fails
        except Exception as error:
            LOG.exception("command %s of %s failed", command.number, model.id)
            found = Outcome.failed(error)
            self._models.close(model.id)  # ahead of the disk
            self._checkpoints.remove_orphans()  # what it has written so far
        if command.kind == TRAIN:
            self._models.note_failure(model.id, command.number, found.error)
        return Done(found)

    async def _run(self, turn: Turn) -> Done:
        if turn.command.kind == TRAIN:
            return await self._trained(turn, await self._prepared(turn))
        return await self._verbs[turn.command.kind](turn.model, turn.command)

    # ---------------------------------------------------------------------------------------------- the commands

    async def _create(self, model: Model, command: CommandRow) -> Done:
        message = messages.read(messages.CreateModel, json.loads(command.body or b""))
        self._shared.check_base(message.base_model)
        await self._models.open(model)
        return Done(reply("create_model", model_id=model.id))

    async def _load_new(self, model: Model, command: CommandRow) -> Done:
        message = messages.read(messages.LoadWeights, json.loads(command.body or b""))
        self._shared.check_base(message.base_model)
        checkpoint = self._checkpoints.find(model.tenant, message.path, (STATE,))
        row = replace(model, lora=checkpoint.lora)
        await self._models.open(row)
        return await self._loaded(row, command, checkpoint, message.optimizer)

    async def _load_weights(self, model: Model, command: CommandRow) -> Done:
        message = messages.read(messages.LoadWeights, json.loads(command.body or b""))
        checkpoint = self._checkpoints.find(model.tenant, message.path, (STATE,))
        return await self._loaded(model, command, checkpoint, message.optimizer)

    async def _loaded(self, model: Model, command: CommandRow, checkpoint: Checkpoint, optimizer: bool) -> Done:
        folder = self._checkpoints.folder_named(checkpoint.folder)
        await self._models.load(model, folder, optimizer)
        found = reply("load_weights", path=checkpoint.path, model_id=model.id)
        return await self._models.write_state(model, command.number, found)

    async def _prepared(self, turn: Turn) -> Work:
        await self._models.shorten(turn.model, turn.command.number - 1)
        most = self._shared.config.limits.dense_elements
        if (request := turn.parsed) is None:
            request = await asyncio.to_thread(read_training, turn.command.body or b"", most)
        work = await asyncio.to_thread(self._models.packed, request)
        self._shared.quotas.spend(turn.model.tenant, work.batch.num_tokens)
        return work

    async def _trained(self, turn: Turn, work: Work) -> Done:
        body = await self._machine.call(self._machine.train, turn.model.id, work)
        return Done(Outcome(body, PROTOBUF), replays=not work.forward_only)

    async def _optim_step(self, model: Model, command: CommandRow) -> Done:
        adam = messages.read(messages.OptimStep, json.loads(command.body or b"")).adam_params or messages.AdamParams()
        if (broken := await self._models.take_failure(model.id)) is not None:
            raise BadRequest(f"no step was made, and the gradients since the last one were dropped, because {broken}")
        step = AdamStep(adam.learning_rate, (adam.beta1, adam.beta2), adam.eps, adam.weight_decay, adam.grad_clip_norm)
        found = await self._machine.of(model.id, TenantModel.step, step)
        metrics = {"skipped:sum": found["skipped"]} | ({"grad_norm:mean": found["norm"]} if "norm" in found else {})
        return await self._models.write_state(model, command.number, reply("optim_step", metrics=metrics))

    async def _saved(self, model: Model, saving: Saving, write: Callable[[TenantModel, Path], object]) -> Checkpoint:
        """The row of files that are written. Raises BadRequest if there is no room, or the name is taken."""
        self._checkpoints.check_free(model, saving)
        folder = self._checkpoints.new_folder()
        digest = getattr(await self._machine.of(model.id, write, folder), "digest", "")
        row = await asyncio.to_thread(self._checkpoints.row, model, saving, folder, digest)
        self._check_room(model, folder, row.bytes)
        return row

    def _check_room(self, model: Model, folder: Path, size: int) -> None:
        limit = (self._registry.one(Key, "name = ?", (model.tenant,)) or NOBODY).bytes
        if limit is not None and self._registry.used_bytes(model.tenant) + size > limit:
            self._checkpoints.discard(folder.name)
            raise BadRequest(
                f"the checkpoint has {size:,} bytes, and {model.tenant} may store {limit:,}: delete others, or finish "
                "sessions"
            )

    async def _save_weights(self, model: Model, command: CommandRow) -> Done:
        message = messages.read(messages.SaveWeights, json.loads(command.body or b""))
        name = message.path or f"step-{command.number:06d}"
        saving = Saving(STATE, name, message.ttl_seconds, json.dumps(message.user_metadata), message.overwrite)
        row = await self._saved(model, saving, TenantModel.save)
        old = self._registry.one(Checkpoint, "path = ?", (row.path,))
        return Done(
            reply("save_weights", path=row.path),
            lambda: self._registry.put(row),
            lambda: self._checkpoints.discard(old.folder if old else ""),
        )

    async def _save_for_sampling(self, model: Model, command: CommandRow) -> Done:
        message = messages.read(messages.SaveForSampling, json.loads(command.body or b""))
        if message.path is not None:
            saving = Saving(SAMPLING, message.path, message.ttl_seconds, json.dumps(message.user_metadata))
            row = await self._saved(model, saving, TenantModel.snapshot)
            return Done(reply("save_weights_for_sampler", path=row.path), lambda: self._registry.put(row))
        session = f"{model.session}:sample:{message.sampling_session_seq_id}"
        if self._registry.one(SnapshotRow, "id = ?", (session,)) is not None:
            raise BadRequest(f"{session} was used for another request")
        snapshot = await self._machine.of(model.id, TenantModel.snapshot, self._checkpoints.new_folder())
        size = await asyncio.to_thread(flush, snapshot.folder)
        self._check_room(model, snapshot.folder, size)
        own = SnapshotRow(
            id=session,
            tenant=model.tenant,
            session=model.session,
            path="",
            folder=snapshot.folder.name,
            digest=snapshot.digest,
            adapter=int(snapshot.adapter),
            follows="",
            created=command.number,
            bytes=size,
        )
        found = reply("save_weights_for_sampler", sampling_session_id=session)
        if message.kind == "snapshot":
            return Done(found, lambda: self._registry.put(own))
        newest = replace(own, id=f"{model.id}:inflight")
        before = self._registry.one(SnapshotRow, "id = ?", (newest.id,))

        def commit() -> None:
            self._registry.put(newest)
            self._registry.put(replace(own, folder="", digest="", follows=newest.id, bytes=0))

        return Done(found, commit, lambda: self._retire(before))

    def _retire(self, snapshot: SnapshotRow | None) -> None:
        if snapshot is not None:
            self._retire_in_rollout(snapshot.folder)
            self._checkpoints.discard(snapshot.folder)

    async def _save_external(self, model: Model, command: CommandRow) -> Done:
        message = messages.read(messages.SaveExternal, json.loads(command.body or b""))
        saving = Saving(EXTERNAL, message.path, message.ttl_seconds)
        row = await self._saved(model, saving, TenantModel.export)
        found = reply("save_weights_external", path=row.path, size_bytes=row.bytes)
        return Done(found, lambda: self._registry.put(row))
