"""Hosts one training engine, and gives it losses: the only place where algorithms and engines meet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hone.engines.base import BaseEngine
from hone.engines.registry import EngineRegistry
from hone.engines.settings import EngineConfig
from hone.models.settings import ModelConfig
from hone.platforms.base import current_platform
from hone.types import Batch, LossFn, Metrics, ModelOutput


@dataclass(frozen=True, slots=True)
class TrainSpec:
    """What a train worker hosts: which model, as which model type, and how it is trained."""

    model: ModelConfig
    engine: EngineConfig
    model_type: str = "language_model"
    temperature: float = 1.0  # of the rollouts: log-probs are those of the distribution that was sampled
    total_steps: int = 0  # optimizer steps of the whole run, for the schedule; 0: a model that is never trained
    reference: ModelConfig | None = None  # whose head "full_kl" needs here; its states come with the batch

    @property
    def replays_routes(self) -> bool:
        """Whether it chooses the experts that a batch names, where it does; a model that is only asked does not."""
        return self.total_steps > 0 and self.engine.routing_replay != "none"


class TrainWorker:
    """One rank of an actor, a critic or a reference model."""

    def __init__(self, spec: TrainSpec) -> None:
        self.engine: BaseEngine = EngineRegistry.create(spec, current_platform())

    def initialize(self) -> None:
        self.engine.initialize()
        self.release_memory()

    def release_memory(self) -> None:
        """Give what the allocator keeps for later back to the device, for another process that shares it."""
        current_platform().empty_cache()

    @property
    def data_parallel_rank(self) -> int:
        return self.engine.data_parallel_rank

    @property
    def data_parallel_size(self) -> int:
        return self.engine.data_parallel_size

    @property
    def is_output_rank(self) -> bool:
        return self.engine.is_output_rank

    def train_batch(self, batch: Batch, loss: LossFn) -> Metrics:
        """One optimizer step on a mini-batch that carries its `loss_weights`."""
        with self.engine.train_mode():
            return self.engine.train_batch(batch, loss)

    def infer_batch(self, batch: Batch, needs: frozenset[str] = frozenset(), adapter: bool = True) -> ModelOutput:
        """Log-probs (language model) or values (value model) of every token, and what `needs` names; each [T].

        Without `adapter`, those of a LoRA model's frozen weights alone: the policy before training.
        """
        with self.engine.eval_mode(), nullcontext() if adapter else self.engine.disable_adapter():
            return self.engine.infer_batch(batch, needs)

    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight under its Hugging Face name, floating-point ones in `dtype`; an adapter is merged in."""
        stream, _ = self.engine.get_per_tensor_param()
        for name, tensor in stream:
            yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor

    def base_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight without the adapter, floating-point ones in `dtype`: what the adapter is to be put on."""
        with self.engine.disable_adapter():
            yield from self.weights(dtype)

    def adapter(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of a LoRA adapter in `dtype`, under the names of PEFT's files. Raises ValueError without one."""
        stream, _ = self.engine.get_per_tensor_param(adapter_only=True)
        for name, tensor in stream:
            yield name, tensor.to(dtype)

    def adapter_config(self) -> dict[str, Any] | None:
        """PEFT's `adapter_config.json` of the model's LoRA adapter; None: it has no adapter."""
        return self.engine.adapter_config()

    def save_checkpoint(self, folder: Path, wait: bool = True) -> None:
        self.engine.save_checkpoint(folder, wait)

    def checkpoint_written(self, wait: bool) -> bool:
        return self.engine.checkpoint_written(wait)

    def load_checkpoint(self, folder: Path) -> None:
        self.engine.load_checkpoint(folder)

    def export_hf(self, folder: Path) -> None:
        self.engine.export_hf(folder)

    def export_adapter(self, folder: Path) -> None:
        self.engine.export_adapter(folder)
