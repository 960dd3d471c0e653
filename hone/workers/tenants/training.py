"""Models that tenants train side by side on one base model: adapters of any rank, and whole models.

    Base --open(LoraConfig)--> TenantModel: an engine with its own adapter and optimizer, and the base's frozen weights
         --open(None)-------->              an engine that trains all weights

The frozen weights of all adapters are one set of tensors. Nothing else is shared, so a model ends with the same bits
whatever others do between its commands.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from hone.engines.base import BaseEngine
from hone.engines.checkpoint.files import CheckpointError
from hone.engines.registry import EngineRegistry
from hone.engines.settings import EngineConfig, LoraConfig, OptimizerConfig
from hone.models.files.tensors import save_tensors
from hone.models.numerics.precision import plain_name
from hone.models.settings import ModelConfig
from hone.platforms.base import current_platform
from hone.rollout.adapters import CONFIG_FILE, WEIGHTS_FILE
from hone.types import Batch, LossFn, Metrics, ModelOutput, Need
from hone.weights.digests.digest import digest_tensors
from hone.workers.train import TrainSpec

GRADIENTS_FILE = "gradients.safetensors"  # of a state between two optimizer steps
WHOLE_FILE = "model.safetensors"  # of a snapshot of all weights; an adapter's has PEFT's files
STEPS = 1 << 30  # the schedule is constant: a step brings its own learning rate
ATTENTION = ("self_attn", "attn", "attention", "linear_attn", "self_attention")  # names of layers
MLP = ("mlp", "feed_forward", "block_sparse_moe", "ffn")
AdapterTensors = tuple[dict[str, Tensor], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class AdamStep:
    """Parameters of one AdamW step."""

    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_norm: float  # gradients are scaled down to this norm; 0: never


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Weights of one model in a folder, and their digest: what has to serve them must have the same."""

    folder: Path
    digest: str
    adapter: bool  # PEFT's files; False: all weights


class Base:
    """One base model, and the engines that train on it."""

    def __init__(self, model: ModelConfig, engine: EngineConfig) -> None:
        self._model = model
        self._engine = engine.model_copy(
            update={
                "max_grad_norm": None,  # each step brings its own
                "optimizer": OptimizerConfig(name="AdamW", lr=1e-4, betas=(0.9, 0.95), options={"eps": 1e-12}),
            }
        )
        self._frozen: dict[str, Tensor] = {}
        self.drops = bool(model.used.dropout)

    def open(self, lora: LoraConfig | None) -> TenantModel:
        """Make a model to train. Raises ModelError or ValueError for an adapter that the model cannot have."""
        engine = self._made(lora, STEPS)
        if lora is not None:
            self._share(engine)
        return TenantModel(engine)

    def frozen(self) -> BaseEngine:
        """An engine with the frozen weights of all adapters alone, which is never trained itself."""
        engine = self._made(None, 0)
        self._share(engine)
        return engine

    def _made(self, lora: LoraConfig | None, steps: int) -> BaseEngine:
        config = self._engine.model_copy(update={"lora": lora})
        engine = EngineRegistry.create(
            TrainSpec(model=self._model, engine=config, total_steps=steps), current_platform()
        )
        engine.initialize()
        return engine

    def _share(self, engine: Any) -> None:
        """Let the frozen weights of an engine be those of the first one."""
        for name, weight in engine.model.named_parameters():
            if not weight.requires_grad:
                weight.data = self._frozen.setdefault(plain_name(name), weight.data)


class TenantModel:
    """One model in training. Calls come one at a time."""

    def __init__(self, engine: BaseEngine) -> None:
        self._engine: Any = engine

    @property
    def trains_adapter(self) -> bool:
        return self._engine.adapter_config() is not None

    @property
    def layers(self) -> dict[str, Any]:
        """PEFT's layers by the paths of the layers that they adapt; none of a model that trains all weights."""
        adapter = self._engine.adapter
        return {} if adapter is None else {layer.path: layer.module for layer in adapter.layers.found}

    @property
    def _masters(self) -> dict[str, Tensor]:
        masters: dict[str, Tensor] = self._engine.weights.masters
        return masters

    def collect(self) -> None:
        """Take over the gradients of a backward that was not this engine's (`SharedForward`)."""
        self._engine.weights.collect()

    def forward_backward(self, batch: Batch, loss: LossFn) -> Metrics:
        """Add the gradients of a batch to those since the last step."""
        metrics: Metrics = self._engine.forward_backward(batch, loss)
        return metrics

    def forward(self, batch: Batch, needs: frozenset[Need]) -> ModelOutput:
        """Log-probs of the tokens with a loss, [T], and the outputs in `needs`."""
        output: ModelOutput = self._engine.infer_batch(batch, needs)
        return output

    def clear_gradients(self) -> None:
        self._engine.weights.clear_gradients()

    def step(self, step: AdamStep) -> dict[str, float]:
        """Clip and update; returns the norm before clipping, and 1 if it was not finite and nothing was changed."""
        weights, optimizer = self._engine.weights, self._engine.update.optimizer
        for group in optimizer.param_groups:
            group |= {"lr": step.learning_rate, "betas": step.betas, "eps": step.eps}
        optimizer.param_groups[0]["weight_decay"] = step.weight_decay  # biases and norms are in the second
        if step.clip_norm > 0:
            weights.settle()
            norm = weights.gradient_norm()
            if step.clip_norm < norm < float("inf"):
                grads = [one.grad for one in self._masters.values() if one.grad is not None]
                torch._foreach_mul_(grads, step.clip_norm / norm)
        metrics = self._engine.optimizer_step()
        found = {"skipped": metrics["train/skipped_steps"].total}
        if step.clip_norm > 0:
            found["norm"] = norm
        elif "train/grad_norm" in metrics:
            found["norm"] = metrics["train/grad_norm"].value
        return found

    # ----------------------------------------------------------------------------------------------------- on disk

    def save(self, folder: Path, gradients: bool = False) -> None:
        """Write weights, optimizer and perhaps gradients into a new folder, and wait until they are there."""
        folder.mkdir(parents=True)
        self._engine.save_checkpoint(folder)
        found = {name: one.grad.contiguous() for name, one in self._masters.items() if one.grad is not None}
        if gradients and found:
            save_tensors(found, folder / GRADIENTS_FILE)

    def load(self, folder: Path, optimizer: bool) -> None:
        """Take over what `save` wrote; without `optimizer`, its state begins anew.

        Raises CheckpointError, with nothing changed, if it is of another adapter or base model. The message does not
        name the folder, which clients do not know.
        """
        try:
            self._engine.load_checkpoint(folder)
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(str(folder), "the checkpoint")) from error
        self.clear_gradients()
        if (folder / GRADIENTS_FILE).exists():
            for name, gradient in load_file(folder / GRADIENTS_FILE).items():
                self._masters[name].grad = gradient.to(self._masters[name].device)
        if not optimizer:
            self._engine.update.optimizer.state.clear()

    def snapshot(self, folder: Path) -> Snapshot:
        """Write the weights to sample from into a new folder: the adapter, or all of them."""
        folder.mkdir(parents=True)
        if not self.trains_adapter:
            stream, _ = self._engine.get_per_tensor_param(dtype=self._engine.compute)
            whole = {name: tensor.contiguous().cpu() for name, tensor in stream}
            save_tensors(whole, folder / WHOLE_FILE)
            return Snapshot(folder, digest_tensors(whole.items()), adapter=False)
        stream, config = self._engine.get_per_tensor_param(adapter_only=True)
        tensors = {name: tensor.contiguous().cpu() for name, tensor in stream}
        save_tensors(tensors, folder / WEIGHTS_FILE)
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=1, sort_keys=True), encoding="utf-8")
        return Snapshot(folder, digest_tensors(tensors.items()), adapter=True)

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder: an adapter in PEFT's format, or the whole model."""
        if self.trains_adapter:
            self._engine.export_adapter(folder)
        else:
            self._engine.export_hf(folder)


def adapter_targets(layers: Collection[str], attention: bool, mlp: bool) -> Any:
    """Targets of an adapter on some kinds of a model's layers, of which `layers` has the names; empty: it has none."""
    wanted = (*(ATTENTION if attention else ()), *(MLP if mlp else ()))
    return "all-linear" if attention and mlp else tuple(name for name in wanted if name in layers)
