"""The contract of a training engine: what an algorithm may ask of one model on one set of devices.

Every rank runs an engine (SPMD). An engine knows nothing of algorithms: it is given a `LossFn` that turns its forward
outputs into per-token losses, and multiplies them by `batch.loss_weights` (whose denominator is already that of the
whole optimizer step), so the gradient does not depend on how the batch was cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch

from hone.engines.settings import EngineConfig
from hone.models.settings import ModelConfig
from hone.types import Batch, LossFn, Metrics, ModelOutput


class EngineSpec(Protocol):
    """What an engine is made from; `hone.workers.train.TrainSpec` is one."""

    @property
    def model(self) -> ModelConfig: ...

    @property
    def engine(self) -> EngineConfig: ...

    @property
    def model_type(self) -> str: ...

    @property
    def temperature(self) -> float:
        """Of the rollouts: log-probs are those of logits / temperature, the distribution that was sampled."""

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run, for the schedule; 0: a model that is never trained."""

    @property
    def reference(self) -> ModelConfig | None:
        """What "full_kl" compares with: its head is loaded here, its "states" come with the batch; None: nothing."""


class BaseEngine(Protocol):
    """One model that can be trained and asked; two model types: `language_model` and `value_model`."""

    model_type: str  # "language_model": logprobs and entropy; "value_model": one scalar per token

    def initialize(self) -> None:
        """Build or load the model, optimizer and schedule. Called once, before anything else."""

    def train_batch(self, batch: Batch, loss: LossFn) -> Metrics:
        """One optimizer step on a mini-batch: `forward_backward`, `optimizer_step`, `lr_scheduler_step`."""

    def forward_backward(self, batch: Batch, loss: LossFn) -> Metrics:
        """Accumulate gradients of sum(loss values * batch.loss_weights) over micro-batches cut by the token budget."""

    def optimizer_step(self) -> Metrics:
        """Clip, step and clear gradients. A non-finite gradient norm skips the step and says so in the metrics."""

    def lr_scheduler_step(self) -> Metrics:
        """Advance the learning-rate schedule by one optimizer step."""

    def infer_batch(self, batch: Batch, needs: frozenset[str] = frozenset()) -> ModelOutput:
        """Forward without gradients, in the batch's own order. `needs` names outputs beyond the plain one."""

    def train_mode(self) -> AbstractContextManager[None]:
        """Model, gradients and optimizer state on the device for the duration."""

    def eval_mode(self) -> AbstractContextManager[None]:
        """Model on the device, dropout off, for the duration."""

    def get_per_tensor_param(
        self, adapter_only: bool = False
    ) -> tuple[Iterator[tuple[str, torch.Tensor]], dict[str, Any] | None]:
        """Every weight under its Hugging Face name (tied heads included), a LoRA adapter merged in; and None.

        With `adapter_only`, the adapter's tensors under the names of PEFT's files, and PEFT's `adapter_config.json`.
        Whole tensors on every rank, gathered as they are taken: every rank has to take all of them. Raises ValueError
        if an adapter is asked for and there is none.
        """

    def to(self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move parts of the engine between its device and CPU memory."""

    def save_checkpoint(self, folder: Path, wait: bool = True) -> None:
        """Weights, optimizer and schedule as safetensors and JSON into an existing folder; never pickle.

        Without `wait`, what is written is copied before this returns, and training may go on meanwhile.
        """

    def checkpoint_written(self, wait: bool = False) -> bool:
        """Whether all that was to be saved is on the disk, on every rank; with `wait`, once it is.

        Every rank has to ask. Raises OSError if it cannot be written.
        """

    def load_checkpoint(self, folder: Path) -> None:
        """Restore what `save_checkpoint` wrote, bit for bit."""

    def export_hf(self, folder: Path) -> None:
        """A folder that `transformers.AutoModelForCausalLM.from_pretrained` loads."""

    def adapter_config(self) -> dict[str, Any] | None:
        """PEFT's `adapter_config.json` of a model with an adapter; None for one without."""

    def export_adapter(self, folder: Path) -> None:
        """A folder that `peft.PeftModel.from_pretrained` loads. Raises ValueError if there is no adapter."""

    def disable_adapter(self) -> AbstractContextManager[None]:
        """The model without its adapter for the duration: its forwards (the reference of a LoRA policy) and weights.

        Raises ValueError if there is no adapter.
        """

    @property
    def data_parallel_rank(self) -> int: ...

    @property
    def data_parallel_size(self) -> int: ...

    @property
    def is_output_rank(self) -> bool:
        """Whether this rank's results are the ones to keep (one rank of each model-parallel group)."""
