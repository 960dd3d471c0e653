"""The models that the machine has open, and how one is taken up again after a restart.

create, load --> open --forward_backward--> gradients --optim_step--> state on disk
restart:  last state --> gradients of the commands since, once more --> the command whose turn it is
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hone.engines.settings import LoraConfig
from hone.service.disk.checkpoints import Checkpoints
from hone.service.disk.registry import CommandRow, Model
from hone.service.futures import Done, Outcome
from hone.service.protocol.data import pack_request
from hone.service.protocol.refusals import BadRequest, Gone
from hone.service.protocol.wire import TrainingRequest, read_training
from hone.service.shared import Shared
from hone.workers.tenants.training import TenantModel, adapter_targets
from hone.workers.tenants.work import Work

TRAIN = "train"  # kind of a forward_backward command


class Models:
    """Opens, closes, loads and saves them."""

    def __init__(self, shared: Shared, checkpoints: Checkpoints) -> None:
        self._shared, self._registry, self._machine = shared, shared.registry, shared.machine
        self._checkpoints = checkpoints
        self._broken: dict[str, str] = {}  # model -> why its gradients since the last step cannot be used

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
        if not (asked["train_attn"] or asked["train_mlp"]):
            raise BadRequest(
                "lora_config trains the unembedding alone, which gets no adapter here; set train_mlp or train_attn"
            )
        targets = adapter_targets(self._machine.rollout.layers, asked["train_attn"], asked["train_mlp"])
        if not targets:
            raise BadRequest(f"{self._shared.base_name} has no such layers: lora_config = {model.lora}")
        return LoraConfig(rank=rank, alpha=training.lora_alpha, seed=model.seed, targets=targets)

    async def open(self, model: Model) -> None:
        await self._machine.call(self._machine.open, model.id, self._lora(model))

    def close(self, model_id: str) -> None:
        """Give back a model's memory; the next command takes up what is on disk."""
        self._broken.pop(model_id, None)
        self._machine.models.pop(model_id, None)

    async def load(self, model: Model, folder: Path, optimizer: bool) -> None:
        await self._machine.of(model.id, TenantModel.load, folder, optimizer)
        self._broken.pop(model.id, None)

    async def drop_gradients(self, model_id: str) -> None:
        self._broken.pop(model_id, None)
        await self._machine.of(model_id, TenantModel.clear_gradients)

    async def take_failure(self, model_id: str) -> str | None:
        """Why no step can be made with the gradients since the last one, which are dropped then; None: it can."""
        why = self._broken.get(model_id)
        if why is not None:
            await self.drop_gradients(model_id)
        return why

    def note_failure(self, model_id: str, number: int, error: str) -> None:
        """Remember that a forward_backward command failed."""
        self._broken.setdefault(model_id, f"forward_backward (seq_id {number}) failed: {error}")

    def packed(self, request: TrainingRequest) -> Work:
        rollout, longest = self._machine.rollout, self._shared.config.training.max_tokens_per_microbatch
        return pack_request(request, rollout.vocabulary, min(longest, rollout.longest + 1))  # + 1: the last target

    async def ensure_open(self, model: Model, command: CommandRow) -> None:
        """Take a model up again after a restart: its last state, then the gradients that were added since."""
        if model.id in self._machine.models:
            return
        row = self._registry.one(Model, "id = ? AND closed = 0", (model.id,))
        if row is None:
            raise Gone(f"the session of {model.id} has ended")
        first = self._registry.one(CommandRow, "model = ? AND number = 0", (model.id,))
        if first is not None and first.error:
            raise BadRequest(f"the model could not be made: {first.error}")
        try:
            await self.open(row)
            await self._take_up(row, command)
        except BaseException:
            self.close(model.id)  # or the next command would train weights that are not the model's
            raise

    async def _take_up(self, model: Model, command: CommandRow) -> None:
        if model.state_folder:
            await self.load(model, self._checkpoints.folder_named(model.state_folder), True)
        kept = "model = ? AND number < ? AND kind = ? AND body IS NOT NULL ORDER BY number"
        for one in self._registry.find(CommandRow, kept, (model.id, command.number, TRAIN)):
            if one.error:
                self.note_failure(model.id, one.number, one.error)
            else:
                request = read_training(one.body or b"", self._shared.config.limits.dense_elements)
                await self._machine.call(self._machine.train, model.id, self.packed(request))

    async def write_state(self, model: Model, number: int, outcome: Outcome) -> Done:
        """Write the state of a model after a command; returns the command's end, which removes the state before."""
        folder = self._checkpoints.new_folder()
        await self._machine.of(model.id, TenantModel.save, folder, True)
        row = replace(model, state_after=number, state_folder=folder.name)
        return Done(outcome, lambda: self._registry.put(row), lambda: self._checkpoints.discard(model.state_folder))

    async def shorten(self, model: Model, number: int) -> None:
        """Write a model's gradients up to a command, if the requests that they come from have too many bytes."""
        if self._registry.kept_bytes(model.id, number) <= self._shared.config.limits.replayed_bytes:
            return
        if model.id in self._broken:  # they will never be used
            self._registry.change(
                CommandRow, "body = NULL", "model = ? AND number <= ? AND error = ''", (model.id, number)
            )
            return
        done = await self.write_state(model, number, Outcome())
        with self._registry.together():
            done.commit()
            self._registry.drop_gradients(model.id)
        done.after()
