"""The commands of a model, and their results, rows and files.

Files come first, then the rows in one transaction with the command's result (`Done.commit`), then what is not needed
any more goes (`Done.after`). A kill between any two of them loses nothing that was confirmed.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hone.config import ConfigError
from hone.engines.settings import LoraConfig
from hone.models.errors import ModelError
from hone.service.disk.checkpoints import EXTERNAL, SAMPLING, STATE, Checkpoints, Saving, flush
from hone.service.disk.registry import NOBODY, Checkpoint, CommandRow, Key, Model, SnapshotRow
from hone.service.futures import JSON, PROTOBUF, Outcome
from hone.service.protocol import messages
from hone.service.protocol.data import Work, pack_request
from hone.service.protocol.refusals import BadRequest, Refused
from hone.service.protocol.wire import TrainingRequest, read_training
from hone.service.shared import Shared
from hone.workers.tenants.training import AdamStep

LOG = logging.getLogger(__name__)
ATTENTION = ("self_attn", "attn", "attention", "linear_attn", "self_attention")
MLP = ("mlp", "feed_forward", "block_sparse_moe", "ffn")


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Done:
    """The end of a command."""

    outcome: Outcome
    commit: Callable[[], None] = _nothing  # rows, in the transaction of the result
    after: Callable[[], None] = _nothing
    replays: bool = False  # whether its content is needed to take the model up again


def reply(kind: str, **fields: Any) -> Outcome:
    """A JSON result."""
    return Outcome(json.dumps({"type": kind, **fields}).encode(), JSON)


class Commands:
    """Runs commands, one at a time."""

    def __init__(self, shared: Shared, checkpoints: Checkpoints, retire: Callable[[str], None]) -> None:
        """`retire` is called with the folder of a snapshot that is replaced, for the rollout to forget it."""
        self._shared, self._registry, self._machine = shared, shared.registry, shared.machine
        self._checkpoints, self._retire_in_rollout = checkpoints, retire
        self._broken: dict[str, str] = {}  # model -> why its gradients since the last step cannot be used
        self._verbs: dict[str, Callable[[Model, CommandRow], Awaitable[Done]]] = {
            "create": self._create,
            "load_new": self._load_new,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_for_sampling,
            "save_weights_external": self._save_external,
            "load_weights": self._load_weights,
        }

    async def outcome(self, model: Model, command: CommandRow, parsed: TrainingRequest | None) -> Done:
        """Run a command; every failure becomes its result."""
        try:
            if command.kind not in ("create", "load_new"):
                await self._ensure_open(model, command)
            if command.kind == "train":
                return await self._train(model, command, parsed)
            return await self._verbs[command.kind](model, command)
        except (Refused, ConfigError, ValueError, ModelError) as error:
            refused = error if isinstance(error, Refused) else BadRequest(str(error))
            found = Outcome.failed(refused)
            if command.kind == "optim_step" and model.id in self._machine.models:
                self._broken.pop(model.id, None)
                await self._machine.call(self._machine.clear_gradients, model.id)  # as every step that fails
        except Exception as error:
            LOG.exception("command %s of %s failed", command.number, model.id)
            found = Outcome.failed(error)
            await self.close(model.id)  # memory may be ahead of the disk: the next command takes up what is there
        if command.kind == "train":
            self._broken.setdefault(model.id, f"forward_backward (seq_id {command.number}) failed: {found.error}")
        return Done(found)

    async def close(self, model_id: str) -> None:
        """Give back a model's memory."""
        self._broken.pop(model_id, None)
        await self._machine.call(self._machine.close, model_id)

    # ------------------------------------------------------------------------------------------------- opening

    def _lora(self, model: Model) -> LoraConfig | None:
        """The adapter of a model. Raises BadRequest for one that is not served."""
        asked, training = model.lora_config, self._shared.config.training
        if asked is None:
            if not training.whole_weights:
                raise BadRequest(
                    "a model without lora_config trains all weights, which needs training.whole_weights=true here"
                )
            return None
        rank = int(asked["rank"])
        if rank > training.max_lora_rank:
            raise BadRequest(f"lora_config.rank = {rank}: at most {training.max_lora_rank} is served here")
        wanted = (*(ATTENTION if asked["train_attn"] else ()), *(MLP if asked["train_mlp"] else ()))
        if not wanted:
            raise BadRequest(
                "lora_config trains the unembedding alone, which gets no adapter here; set train_mlp or train_attn"
            )
        targets: Any = "all-linear"
        if not (asked["train_attn"] and asked["train_mlp"]):
            targets = tuple(part for part in wanted if part in self._machine.rollout.layers)
            if not targets:
                raise BadRequest(f"{self._shared.base_name} has no layers of these names: {', '.join(wanted)}")
        return LoraConfig(rank=rank, alpha=training.lora_alpha, seed=model.seed, targets=targets)

    async def _ensure_open(self, model: Model, command: CommandRow) -> None:
        """Take a model up again after a restart: its last state, then the gradients that were added since."""
        if model.id in self._machine.models:
            return
        first = self._registry.one(CommandRow, "model = ? AND number = 0", (model.id,))
        if first is not None and first.error:
            raise BadRequest(f"the model could not be made: {first.error}")
        try:
            await self._machine.call(self._machine.open, model.id, self._lora(model))
            await self._take_up(model, command)
        except BaseException:
            await self.close(model.id)  # or the next command would train weights that are not the model's
            raise

    async def _take_up(self, model: Model, command: CommandRow) -> None:
        if model.state_folder:
            folder = self._checkpoints.folder_named(model.state_folder)
            await self._machine.call(self._machine.load, model.id, folder, True)
        since = self._registry.find(
            CommandRow,
            "model = ? AND number > ? AND number < ? ORDER BY number",
            (model.id, model.state_after, command.number),
        )
        for one in since:
            if one.kind == "train" and one.error:
                self._broken.setdefault(model.id, f"forward_backward (seq_id {one.number}) failed: {one.error}")
            elif one.kind == "train" and one.body is not None:
                request = read_training(one.body, self._shared.config.limits.dense_elements)
                if not request.forward_only:
                    await self._machine.call(self._machine.train, model.id, self._packed(request), False)
            elif one.kind == "optim_step":  # one that failed: the later ones are in the state
                self._broken.pop(model.id, None)
                await self._machine.call(self._machine.clear_gradients, model.id)

    async def _state(self, model: Model, number: int) -> tuple[Model, Callable[[], None]]:
        """Write the state of a model after a command; returns the new row, and what removes the state before."""
        folder = self._checkpoints.new_folder()
        await self._machine.call(self._machine.save, model.id, folder)
        return replace(model, state_after=number, state_folder=folder.name), lambda: self._checkpoints.discard(
            model.state_folder
        )

    def _keep_state(self, row: Model) -> None:
        self._registry.put(row)
        self._registry.change(CommandRow, "body = NULL", "model = ? AND number <= ?", (row.id, row.state_after))

    # ---------------------------------------------------------------------------------------------- the commands

    async def _create(self, model: Model, command: CommandRow) -> Done:
        message = messages.read(messages.CreateModel, json.loads(command.body or b""))
        self._shared.check_base(message.base_model)
        await self._machine.call(self._machine.open, model.id, self._lora(model))
        return Done(reply("create_model", model_id=model.id))

    async def _load_new(self, model: Model, command: CommandRow) -> Done:
        message = messages.read(messages.LoadWeights, json.loads(command.body or b""))
        self._shared.check_base(message.base_model)
        checkpoint = self._checkpoints.find(model.tenant, message.path, (STATE,))
        row = replace(model, lora=checkpoint.lora)
        await self._machine.call(self._machine.open, model.id, self._lora(row))
        return await self._loaded(row, command, checkpoint, message.optimizer)

    async def _load_weights(self, model: Model, command: CommandRow) -> Done:
        message = messages.read(messages.LoadWeights, json.loads(command.body or b""))
        checkpoint = self._checkpoints.find(model.tenant, message.path, (STATE,))
        return await self._loaded(model, command, checkpoint, message.optimizer)

    async def _loaded(self, model: Model, command: CommandRow, checkpoint: Checkpoint, optimizer: bool) -> Done:
        folder = self._checkpoints.folder_of(checkpoint)
        await self._machine.call(self._machine.load, model.id, folder, optimizer)
        self._broken.pop(model.id, None)
        row, after = await self._state(model, command.number)
        found = reply("load_weights", path=checkpoint.path, model_id=model.id)
        return Done(found, lambda: self._keep_state(row), after)

    def _packed(self, request: TrainingRequest) -> Work:
        longest = self._shared.config.training.max_tokens_per_microbatch
        return pack_request(request, self._machine.rollout.vocabulary, longest)

    async def _train(self, model: Model, command: CommandRow, parsed: TrainingRequest | None) -> Done:
        if parsed is None:
            parsed = await asyncio.to_thread(
                read_training, command.body or b"", self._shared.config.limits.dense_elements
            )
        work = await asyncio.to_thread(self._packed, parsed)
        self._shared.quotas.spend(model.tenant, work.batch.num_tokens)
        body = await self._machine.call(self._machine.train, model.id, work, parsed.forward_only)
        return Done(Outcome(body, PROTOBUF), replays=not parsed.forward_only)

    async def _optim_step(self, model: Model, command: CommandRow) -> Done:
        adam = messages.read(messages.OptimStep, json.loads(command.body or b"")).adam_params or messages.AdamParams()
        if (broken := self._broken.pop(model.id, None)) is not None:
            await self._machine.call(self._machine.clear_gradients, model.id)
            raise BadRequest(f"no step was made, and the gradients since the last one were dropped, because {broken}")
        step = AdamStep(adam.learning_rate, (adam.beta1, adam.beta2), adam.eps, adam.weight_decay, adam.grad_clip_norm)
        found = await self._machine.call(self._machine.step, model.id, step)
        row, after = await self._state(model, command.number)
        metrics = {"skipped:sum": found["skipped"]} | ({"grad_norm:mean": found["norm"]} if "norm" in found else {})
        return Done(reply("optim_step", metrics=metrics), lambda: self._keep_state(row), after)

    async def _complete(self, model: Model, saving: Saving, folder: Path, digest: str = "") -> Checkpoint:
        """The row of files that are written. Raises BadRequest, without them, if the tenant has no room for them."""
        row = await asyncio.to_thread(self._checkpoints.row, model, saving, folder, digest)
        limit = (self._registry.one(Key, "name = ?", (model.tenant,)) or NOBODY).bytes
        if limit is not None and self._registry.used_bytes(model.tenant) + row.bytes > limit:
            self._checkpoints.discard(folder.name)
            raise BadRequest(
                f"{row.path} has {row.bytes:,} bytes, and {model.tenant} may store {limit:,}: delete others"
            )
        return row

    async def _save_weights(self, model: Model, command: CommandRow) -> Done:
        message = messages.read(messages.SaveWeights, json.loads(command.body or b""))
        name = message.path or f"step-{command.number:06d}"
        saving = Saving(STATE, name, message.ttl_seconds, json.dumps(message.user_metadata), message.overwrite)
        self._checkpoints.check_free(model, saving)
        folder = self._checkpoints.new_folder()
        await self._machine.call(self._machine.save, model.id, folder)
        row = await self._complete(model, saving, folder)
        old = self._registry.one(Checkpoint, "path = ?", (row.path,))
        return Done(
            reply("save_weights", path=row.path),
            lambda: self._registry.put(row),
            lambda: self._checkpoints.discard(old.folder if old else ""),
        )

    async def _save_for_sampling(self, model: Model, command: CommandRow) -> Done:
        message = messages.read(messages.SaveForSampling, json.loads(command.body or b""))
        saving = Saving(SAMPLING, message.path or "", message.ttl_seconds, json.dumps(message.user_metadata))
        if message.path is not None:
            self._checkpoints.check_free(model, saving)
        snapshot = await self._machine.call(self._machine.snapshot, model.id, self._checkpoints.new_folder())
        if message.path is not None:
            row = await self._complete(model, saving, snapshot.folder, snapshot.digest)
            return Done(reply("save_weights_for_sampler", path=row.path), lambda: self._registry.put(row))
        await asyncio.to_thread(flush, snapshot.folder)
        session = f"{model.session}:sample:{message.sampling_session_seq_id}"
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
        )
        found = reply("save_weights_for_sampler", sampling_session_id=session)
        if message.kind == "snapshot":
            return Done(found, lambda: self._registry.put(own))
        newest = replace(own, id=f"{model.id}:inflight")
        before = self._registry.one(SnapshotRow, "id = ?", (newest.id,))

        def commit() -> None:
            self._registry.put(newest)
            self._registry.put(replace(own, folder="", digest="", follows=newest.id))

        return Done(found, commit, lambda: self._retire(before))

    def _retire(self, snapshot: SnapshotRow | None) -> None:
        if snapshot is not None:
            self._retire_in_rollout(snapshot.folder)
            self._checkpoints.discard(snapshot.folder)

    async def _save_external(self, model: Model, command: CommandRow) -> Done:
        message = messages.read(messages.SaveExternal, json.loads(command.body or b""))
        saving = Saving(EXTERNAL, message.path, message.ttl_seconds)
        self._checkpoints.check_free(model, saving)
        folder = self._checkpoints.new_folder()
        await self._machine.call(self._machine.export, model.id, folder)
        row = await self._complete(model, saving, folder)
        return Done(
            reply("save_weights_external", path=row.path, size_bytes=row.bytes), lambda: self._registry.put(row)
        )
