"""What a trainer holds of each role: typed verbs over a worker group, whatever runtime hosts it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from hone.config import ConfigError
from hone.models.routing import ROUTES
from hone.rollout.adapters import AdapterKind
from hone.rollout.base import RolloutEngine
from hone.rollout.router import Router
from hone.runtime.base import PhaseFn, WorkerGroup
from hone.runtime.watchdog import progress
from hone.types import Batch, Completion, Image, LossFn, Metrics, ModelOutput, SamplingParams, merge_metrics
from hone.weights.base import Adapter
from hone.workers.probe import Probe
from hone.workers.weight_ways import Source, WeightWay

R = TypeVar("R")
RecordFn = Callable[[Metrics], None]
RunFn = Callable[[Coroutine[Any, Any, Any]], Any]

ADAPTER = "policy"  # its name on the servers

OWN_METRICS = ("critic", "process_reward")
"""Roles that learn beside the policy: their loss, learning rate and gradient norm are not merged with the policy's."""


def without_routes(batch: Batch) -> Batch:
    """The batch without the experts that its tokens went to: they are most of it, and of use to one model only."""
    if ROUTES not in batch.extras:
        return batch
    return batch.with_(extras={name: value for name, value in batch.extras.items() if name != ROUTES})


class TrainHandle:
    """An actor, critic or reference model, as its trainer sees it."""

    def __init__(self, group: WorkerGroup, record: RecordFn, replays_routes: bool = False) -> None:
        """Only a model that replays the experts of a batch (`TrainSpec.replays_routes`) is sent them."""
        self.role = group.role
        self._replays_routes = replays_routes
        self.updates = 0  # how often its weights were changed
        self._group = group
        self._record = record

    def initialize(self) -> None:
        self._group.call("initialize")

    def release_memory(self) -> None:
        """Leave the device to a rollout in another process: this one holds what it needs and no more."""
        self._group.call("release_memory")

    def train_batch(self, batch: Batch, loss: LossFn) -> None:
        """One optimizer step; its metrics are recorded, `train/...` of `OWN_METRICS` under the role's name."""
        self.updates += 1
        metrics: Metrics = self._group.call("train_batch", self._sent(batch), loss)
        if self.role in OWN_METRICS:
            metrics = {name.replace("train/", f"{self.role}/", 1): metric for name, metric in metrics.items()}
        self._record(metrics)

    def infer_batch(self, batch: Batch, needs: frozenset[str] = frozenset(), adapter: bool = True) -> ModelOutput:
        """Log-probs or values of every token, and what `needs` names; each [T].

        Without `adapter`, those of a LoRA model's frozen weights: the policy before training.
        """
        sent = self._sent(batch) if adapter else without_routes(batch)  # the frozen weights are another model
        output: ModelOutput = self._group.call("infer_batch", sent, needs, adapter)
        return output

    def _sent(self, batch: Batch) -> Batch:
        return batch if self._replays_routes else without_routes(batch)

    def weights(self, dtype: torch.dtype) -> Any:
        """Every weight as it is computed with; a LoRA adapter is merged in."""
        return self._group.call("weights", dtype)

    def base_weights(self, dtype: torch.dtype) -> Any:
        """Every weight without the LoRA adapter: training never changes them."""
        return self._group.call("base_weights", dtype)

    def adapter(self, dtype: torch.dtype) -> Any:
        """The tensors of the LoRA adapter, under PEFT's names."""
        return self._group.call("adapter", dtype)

    def adapter_config(self) -> dict[str, Any] | None:
        """PEFT's configuration of the LoRA adapter, as JSON values; None: the model has none."""
        config: dict[str, Any] | None = self._group.call("adapter_config")
        return config

    def save_checkpoint(self, folder: Path) -> None:
        """Copy what is to be saved; it is written into `folder` while training goes on."""
        self._group.call("save_checkpoint", folder, False)

    def checkpoint_written(self, wait: bool) -> bool:
        """Whether all of it is on the disk; with `wait`, once it is. Raises OSError if it cannot be written."""
        written: bool = self._group.call("checkpoint_written", wait)
        return written

    def load_checkpoint(self, folder: Path) -> None:
        self.updates += 1
        self._group.call("load_checkpoint", folder)

    def export(self, folder: Path) -> None:
        """The whole model into `folder`/export; the adapter of a LoRA model by itself, into `folder`/adapter."""
        self._group.call("export_hf", folder / "export")
        if self.adapter_config() is not None:
            self._group.call("export_adapter", folder / "adapter")


@dataclass(frozen=True, slots=True)
class AdapterRule:
    """When a policy's LoRA adapter travels by itself, after its base was sent once."""

    unfit: Callable[[AdapterKind], str]  # why the rollout cannot take one of a kind; empty: it can
    required: bool  # one that it cannot take is an error; else it is merged into all weights
    model: str  # transformers' `model_type` of the policy


@dataclass(frozen=True, slots=True)
class RolloutParts:
    """What a rollout is made of (`workers.rollout` builds it)."""

    engine: RolloutEngine | Router
    dtype: torch.dtype  # in which it stores weights
    way: WeightWay
    sleep_level: int = 0  # what it gives back while the policy is trained; 0: nothing
    probe: Probe | None = None  # compares log-probs of both sides after each sync
    adapter: AdapterRule | None = None  # when a LoRA adapter is sent by itself; None: all weights are, merged


class RolloutHandle:
    """The rollout role: generation for episodes, and the receiving end of the weight sync."""

    def __init__(self, parts: RolloutParts, run: RunFn, phase: PhaseFn) -> None:
        self._parts = parts
        self._engine = parts.engine
        self._run = run
        self._phase = phase
        self._actor: TrainHandle | None = None  # whose weights are served
        self._actor_updates = 0  # how often it had been changed when they were sent
        self._version = -1
        self._kept: Metrics = {}  # counted before a probe, and not yet asked for
        self._asleep = False
        if isinstance(parts.engine, Router):
            parts.engine.restore_with(self._restore)

    async def generate(
        self, request_id: str, token_ids: tuple[int, ...], sampling: SamplingParams, images: tuple[Image, ...] = ()
    ) -> Completion:
        completion = await self._engine.generate(request_id, token_ids, sampling, *((images,) if images else ()))
        progress()
        return completion

    def make_room(self) -> None:
        """Give the memory that training needs back, where rollout and training share a device.

        Nothing is generated until the next `sync_from`, which wakes the engine.
        """
        if self._parts.sleep_level and not self._asleep:
            with self._phase("sleep"):
                self._run(self._engine.sleep(self._parts.sleep_level))
            self._asleep = True

    def sync_from(self, actor: TrainHandle, version: int) -> Metrics:
        """Send the actor's weights as `version`; returns only when their arrival is proven."""
        with self._phase("weight_sync"):
            self._actor, self._actor_updates, self._version = actor, actor.updates, version
            metrics: Metrics = self._run(self._send(actor, version))
        if self._parts.probe is not None:
            with self._phase("weight_probe"):
                metrics |= self._compare(self._parts.probe, actor, version)
        return metrics

    async def _send(self, actor: TrainHandle, version: int) -> Metrics:
        if self._asleep:
            actor.release_memory()  # what the update has freed: its allocator would keep it from the rollout
            await self._engine.wake_up(("weights",))
        metrics = await self._parts.way.send(self._source(actor), version)
        if self._asleep:
            actor.release_memory()
            await self._engine.wake_up(("kv_cache",))
            self._asleep = False
        return metrics

    def _source(self, actor: TrainHandle) -> Source:
        """What the actor has to send: all its weights, or base and adapter apart."""
        dtype = self._parts.dtype
        config = actor.adapter_config() if self._parts.adapter is not None else None
        if config is None or not self._goes_alone(config):
            return Source(lambda: actor.weights(dtype))
        alone = (lambda: actor.adapter(dtype)), Adapter(ADAPTER, config)
        return Source(lambda: actor.base_weights(dtype), alone)

    def _goes_alone(self, config: Mapping[str, Any]) -> bool:
        """Whether the adapter is one that the rollout takes. Raises ConfigError if it has to be, and is not."""
        rule = self._parts.adapter
        reason = "" if rule is None else rule.unfit(AdapterKind.of(config, rule.model))
        if reason and rule is not None and rule.required:
            raise ConfigError(f"actor.lora.sync: adapter, but the rollout cannot take this adapter by itself: {reason}")
        return not reason

    async def _restore(self, replica: Any) -> bool:
        """Weights for a replica that was started anew: the actor's, if they are still those that the others serve.

        The loop may stand still in the middle of it while the actor is trained. Then what was sent is a mixture of two
        versions, or no longer the one that is served, though its digest is right: False, and the next sync reaches it.
        """
        actor, version = self._actor, self._version
        if actor is None or actor.updates != self._actor_updates:
            return False
        updates = actor.updates
        await self._parts.way.restore(replica, self._source(actor), version)
        return (self._actor, actor.updates, self._version) == (actor, updates, version)

    def _compare(self, probe: Probe, actor: TrainHandle, version: int) -> Metrics:
        router = self._engine if isinstance(self._engine, Router) else None
        replicas = router.serving if router is not None else [self._engine]
        self._kept = merge_metrics(self._kept, self._engine.metrics())
        asked = self._run(probe.ask(replicas, version, router.replica_failed if router is not None else None))
        self._engine.metrics()  # what the probe counts is not the step's
        return probe.compare(asked, lambda batch: actor.infer_batch(batch), version)

    @property
    def weight_version(self) -> int:
        return self._engine.weight_version

    def metrics(self) -> Metrics:
        """What the engine has counted since the last call."""
        kept, self._kept = self._kept, {}
        return merge_metrics(kept, self._engine.metrics())

    def close(self) -> None:
        """End every server and the sender of weights; nothing of them survives. Again is fine."""
        try:
            if isinstance(self._engine, Router):
                self._run(self._engine.close())
        finally:
            self._run(self._parts.way.close())
