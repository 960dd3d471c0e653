"""The contract of a training engine: the verbs of one model on one set of devices.

Every rank runs an engine (SPMD). An engine does not know the algorithm: a `LossFn` computes per-token losses from its
outputs, and the engine multiplies them by `batch.loss_weights`. These carry the denominator of the whole optimizer
step, so the gradient does not depend on how the batch was cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hone.engines.settings import EngineConfig
from hone.models.settings import ModelConfig
from hone.types import Batch, LossFn, Metrics, ModelOutput, Need


class EngineSpec(Protocol):
    """Input of an engine's constructor; `hone.workers.train.TrainSpec` is one."""

    @property
    def model(self) -> ModelConfig: ...

    @property
    def engine(self) -> EngineConfig: ...

    @property
    def model_type(self) -> str: ...

    @property
    def temperature(self) -> float:
        """The rollout's temperature: log-probs are computed from logits / temperature."""

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run, for the schedule; 0: a model that is never trained."""

    @property
    def reference(self) -> ModelConfig | None:
        """The model that "full_kl" compares with: the engine loads its head, the batch has its hidden states."""

    @property
    def follows(self) -> bool:
        """Return whether `blend` changes a model that is never trained; such an engine has checkpoints."""


class Ranks(Protocol):
    """One rank's view of the ranks that train a model together."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    @property
    def data_parallel_rank(self) -> int: ...

    @property
    def data_parallel_size(self) -> int: ...

    @property
    def is_output_rank(self) -> bool:
        """Return whether this is the first of the ranks that compute the same results."""

    @property
    def token_ranks(self) -> int:
        """Return the number of ranks that share the tokens of one micro-batch (sequence parallel)."""

    def sum(self, value: Tensor) -> Tensor:
        """Sum over all ranks, in place."""

    def most(self, count: int, device: str) -> int:
        """The maximum of a count over all ranks."""

    def meet(self) -> None:
        """Wait until every rank is here, at most as long as the process group's timeout."""


class JobRanks:
    """Parts that do not depend on the mesh: collectives over all ranks of the job."""

    __slots__ = ()

    def sum(self, value: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        dist.all_reduce(value)
        return value

    def most(self, count: int, device: str) -> int:
        """Maximum over all ranks."""
        value = torch.tensor(count, device=device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return int(value)

    def meet(self) -> None:
        """Wait until every rank has called this, at most for the process group's timeout."""
        dist.barrier()


def deadline_of_groups(device: str) -> timedelta:
    """The deadline of the job's collectives."""
    internals: Any = dist.distributed_c10d
    deadline: timedelta = internals._get_default_group()._get_backend(torch.device(device)).options._timeout
    return deadline


def give_deadline(deadline: timedelta) -> None:
    """Set the deadline of every process group: torch gives each new one its default of 30 minutes."""
    internals: Any = dist.distributed_c10d
    for group, (backend, _) in internals._world.pg_map.items():
        if backend != "fake":  # of dimensions of one rank, in which nobody waits
            internals._set_pg_timeout(deadline, group)


@dataclass(frozen=True, slots=True)
class OneProcess:
    """The `Ranks` of a model that one process trains."""

    rank: int = 0
    world: int = 1
    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    is_output_rank: bool = True
    token_ranks: int = 1

    def sum(self, value: Tensor) -> Tensor:
        return value

    def most(self, count: int, device: str) -> int:
        return count

    def meet(self) -> None: ...


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes that a model will need of its rank's device beyond what it has allocated after `initialize`."""

    kept: int = 0  # between the verbs, from the first optimizer step on
    training: int = 0  # more than that during an optimizer step, without activations


class BaseEngine(Protocol):
    """One model that can be trained and evaluated: a `language_model` or a `value_model`."""

    model_type: str  # "language_model": logprobs and entropy; "value_model": one scalar per token
    ranks: Ranks

    def initialize(self) -> None:
        """Build or load the model, optimizer and schedule. Called once, before anything else."""

    def train_batch(self, batch: Batch, loss: LossFn) -> Metrics:
        """One optimizer step on a mini-batch: `forward_backward`, `optimizer_step`, `lr_scheduler_step`."""

    def forward_backward(self, batch: Batch, loss: LossFn) -> Metrics:
        """Accumulate gradients of sum(loss values * batch.loss_weights) over micro-batches cut by the token budget."""

    def optimizer_step(self) -> Metrics:
        """Clip, step and clear gradients. If their norm is not finite, skip the step and count it in the metrics."""

    def lr_scheduler_step(self) -> Metrics:
        """Advance the learning-rate schedule by one optimizer step."""

    def infer_batch(self, batch: Batch, needs: frozenset[Need] = frozenset()) -> ModelOutput:
        """Forward without gradients, in the batch's own order. `needs` names outputs beyond the plain one."""

    def train_mode(self) -> AbstractContextManager[None]:
        """Model, gradients and optimizer state on the device for the duration."""

    def eval_mode(self) -> AbstractContextManager[None]:
        """Model on the device, dropout off, for the duration."""

    def get_per_tensor_param(
        self, adapter_only: bool = False, dtype: torch.dtype | None = None
    ) -> tuple[Iterator[tuple[str, torch.Tensor]], dict[str, Any] | None]:
        """Stream every weight under its Hugging Face name (tied heads included), a LoRA adapter merged in; and None.

        `dtype` casts them, except weights that the architecture keeps in float32 (`hone.models.numerics.precision`);
        None: the precision that is trained.
        With `adapter_only`, the adapter's tensors under PEFT's names, and PEFT's `adapter_config.json`.
        Every rank gets whole tensors, which are gathered during the iteration, and must iterate to the end. Raises
        ValueError for `adapter_only` without an adapter.
        """

    def blend(self, tensors: Mapping[str, torch.Tensor], mixup: float) -> None:
        """Move some weights towards whole tensors of the same names: mixup * tensor + (1 - mixup) * weight.

        Every rank is given the same tensors, with names as `get_per_tensor_param` has them. Raises ValueError for a
        name or a shape that the model does not have.
        """

    def memory_needs(self) -> MemoryNeeds:
        """Return the memory that the first step adds to the device; the same on every rank, up to uneven cuts."""

    def to(self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move parts of the engine between its device and CPU memory."""

    def save_checkpoint(self, folder: Path, wait: bool = True) -> None:
        """Weights, optimizer and schedule as safetensors and JSON into an existing folder; never pickle.

        Without `wait`, this returns once the state is copied; files are written while training goes on.
        """

    def checkpoint_written(self, wait: bool = False) -> bool:
        """Return whether every rank has written its files; with `wait`, wait until then.

        Every rank calls this. Raises OSError if a file cannot be written.
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
        """Run forwards and read weights without the adapter: the reference of a LoRA policy.

        Raises ValueError if there is no adapter.
        """
