"""What a trainer holds of each role: typed verbs over a worker group, whatever runtime hosts it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import torch

from hone.rollout.base import RolloutEngine
from hone.runtime.base import PhaseFn, WorkerGroup
from hone.types import Batch, Completion, LossFn, Metrics, ModelOutput, SamplingParams
from hone.weights.local import sync

R = TypeVar("R")
RecordFn = Callable[[Metrics], None]
RunFn = Callable[[Coroutine[Any, Any, Any]], Any]

OWN_METRICS = ("critic",)
"""Roles that learn beside the policy: their loss, learning rate and gradient norm are not merged with the policy's."""


class TrainHandle:
    """An actor, critic or reference model, as its trainer sees it."""

    def __init__(self, group: WorkerGroup, record: RecordFn) -> None:
        self.role = group.role
        self._group = group
        self._record = record

    def initialize(self) -> None:
        self._group.call("initialize")

    def train_batch(self, batch: Batch, loss: LossFn) -> None:
        """One optimizer step; its metrics are recorded, the critic's `train/...` under `critic/...`."""
        metrics: Metrics = self._group.call("train_batch", batch, loss)
        if self.role in OWN_METRICS:
            metrics = {name.replace("train/", f"{self.role}/", 1): metric for name, metric in metrics.items()}
        self._record(metrics)

    def infer_batch(self, batch: Batch, needs: frozenset[str] = frozenset()) -> ModelOutput:
        """Log-probs or values of every token, and what `needs` names; each [T]."""
        output: ModelOutput = self._group.call("infer_batch", batch, needs)
        return output

    def weights(self, dtype: torch.dtype) -> Any:
        return self._group.call("weights", dtype)

    def save_checkpoint(self, folder: Path) -> None:
        self._group.call("save_checkpoint", folder)

    def load_checkpoint(self, folder: Path) -> None:
        self._group.call("load_checkpoint", folder)

    def export_hf(self, folder: Path) -> None:
        self._group.call("export_hf", folder)


class RolloutHandle:
    """The rollout role: generation for episodes, and the receiving end of the weight sync."""

    def __init__(self, engine: RolloutEngine, dtype: torch.dtype, run: RunFn, phase: PhaseFn) -> None:
        self._engine = engine
        self._dtype = dtype
        self._run = run
        self._phase = phase

    async def generate(self, request_id: str, token_ids: tuple[int, ...], sampling: SamplingParams) -> Completion:
        return await self._engine.generate(request_id, token_ids, sampling)

    def sync_from(self, actor: TrainHandle, version: int) -> Metrics:
        """Send the actor's weights as `version`; returns only when their arrival is proven."""
        with self._phase("weight_sync"):
            metrics: Metrics = self._run(sync(actor.weights(self._dtype), self._engine.update_weights, version))
        return metrics

    @property
    def weight_version(self) -> int:
        return self._engine.weight_version

    def metrics(self) -> Metrics:
        return self._engine.metrics()
