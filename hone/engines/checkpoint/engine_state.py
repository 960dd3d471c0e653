"""Saves and restores one engine: weights, optimizer, schedule, and the identity of adapter and base."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hone.engines.base import Ranks
from hone.engines.checkpoint.files import (
    ENGINE_FILE,
    FORMAT,
    MODEL,
    OPTIMIZER,
    CheckpointError,
    PartsReader,
    Writer,
    load_json,
    part_file,
    read_all,
    snapshot,
)
from hone.engines.checkpoint.optimizer_state import optimizer_parts, read_optimizer
from hone.engines.optimizers import Update
from hone.engines.parts import Part, Weights
from hone.full_disk import until_room

if TYPE_CHECKING:
    from hone.engines.lora.adapter import Adapter


class Checkpoint:
    """The state of one engine, in memory and in a folder."""

    def __init__(
        self,
        ranks: Ranks,
        device: str,
        update: Update | None,
        weights: Weights,
        adapter: Adapter | None,
        compute_dtype: str,
    ) -> None:
        """`update` is None for a model that no optimizer changes."""
        self._ranks = ranks
        self._device = device
        self._update = update
        self._weights = weights
        self._adapter = adapter
        self._compute_dtype = compute_dtype
        self._writer = Writer()

    def save(self, folder: Path, model: Iterable[Part]) -> None:
        """Copy the state, and begin to write the copies into an existing folder."""
        rank, ranks = self._ranks.rank, self._ranks.world
        update = self._update
        files = [snapshot(folder / part_file(MODEL, rank, ranks), model)]
        plain: dict[str, Any] = {}
        if update is not None:
            tensors, plain = optimizer_parts(update.optimizer, self._weights.trained())
            files.append(snapshot(folder / part_file(OPTIMIZER, rank, ranks), tensors))
        self._writer.start(files)
        facts = {
            "format": FORMAT,
            "ranks": ranks,
            "compute_dtype": self._compute_dtype,
            "optimizer": self._optimizer_name,
            "optimizer_numbers": plain,
            "schedule_step": 0 if update is None else update.schedule.step_count,
            "adapter": None if self._adapter is None else self._adapter.identity(),
        }
        if rank == 0:
            text = json.dumps(facts, indent=1)
            until_room(lambda: (folder / ENGINE_FILE).write_text(text, encoding="utf-8"))

    def written(self, wait: bool) -> bool:
        """Return whether all ranks have written their files; with `wait`, wait until they have. Raises OSError."""
        done = self._writer.done(wait)
        return self._ranks.most(int(not done), self._device) == 0

    def load(self, folder: Path, model: Iterable[Part]) -> None:
        """Restore what `save` wrote into the live tensors of `model`. Raises CheckpointError, with nothing changed."""
        facts = load_json(folder / ENGINE_FILE)
        self._check_adapter(facts.get("adapter"), folder)
        update, mine = self._update, self._optimizer_name
        if facts["optimizer"] != mine:
            theirs = facts["optimizer"] or "no optimizer"
            raise CheckpointError(f"{folder} was written with {theirs}, this run's optimizer is {mine or 'none'}")
        tensors = read_all(PartsReader(folder, MODEL, facts["ranks"]), model)
        state: dict[Tensor, dict[str, Any]] = {}
        if update is not None:
            reader = PartsReader(folder, OPTIMIZER, facts["ranks"])
            state = read_optimizer(reader, self._weights.trained(), facts["optimizer_numbers"], update.optimizer)
        for live, stored in tensors:
            live.copy_(stored)
        self._weights.publish()
        if update is not None:
            update.optimizer.state.clear()
            update.optimizer.state.update(state)
            update.schedule.step_count = facts["schedule_step"]
            update.apply_schedule()

    @property
    def _optimizer_name(self) -> str | None:
        return None if self._update is None else type(self._update.optimizer).__name__

    def _check_adapter(self, stored: dict[str, Any] | None, folder: Path) -> None:
        """Raise CheckpointError if a checkpoint's adapter is not this run's, or belongs to another base model."""
        mine = None if self._adapter is None else self._adapter.facts()
        theirs = None if stored is None else {key: value for key, value in stored.items() if key != "base"}
        if mine != theirs:
            said = ["an adapter " + str(one) if one else "no adapter" for one in (theirs, mine)]
            raise CheckpointError(f"{folder} was written with {said[0]}, this run has {said[1]}")
        if stored is not None and self._adapter is not None:
            self._adapter.check_base(stored["base"], folder)


def require_dtype(folder: Path, mine: str, key: str) -> None:
    """Raise CheckpointError if the run that wrote a checkpoint computed in another dtype than `auto` chooses here."""
    began = load_json(folder / ENGINE_FILE).get("compute_dtype", mine)
    if began != mine:
        raise CheckpointError(
            f"{folder} was written by a run that computed in {began}, and {key}: auto chooses {mine} on this machine; "
            f"set {key}={began} to continue as the run began, or {key}={mine} to change it"
        )
