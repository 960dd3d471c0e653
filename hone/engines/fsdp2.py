"""The `fsdp2` engine: any Hugging Face causal language model, or a value model on its body, in plain PyTorch.

    Batch --microbatches--> packed forward --LossFn--> sum(values * loss_weights) --backward--> gradients   (repeated)
                                                                                      |
    working weights (compute_dtype) <--publish-- masters <--optimizer, if the norm is finite--

One process holds the whole model here. Nothing below reads a mesh: the loss weights carry the denominator of the whole
step, gradients are sums, and weights are reached through `Weights` alone, which is where sharding will go.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hone.data.packing import restore, select
from hone.engines import checkpoint as files
from hone.engines.base import EngineSpec
from hone.engines.forward import Forward, language_forward, value_forward
from hone.engines.layout import cut_batch
from hone.engines.optimizers import build_optimizer, gradient_norm, scale_gradients
from hone.engines.precision import Weights
from hone.engines.probe import check_body, check_head
from hone.engines.schedules import Schedule
from hone.models.attention import checkpoint_contexts
from hone.models.fused_norm import fuse_norms
from hone.models.loading import DTYPES, load_language_model, load_value_model, without_progress_bars
from hone.models.tokenizer import load_tokenizer
from hone.types import Batch, LossFn, Metric, Metrics, ModelOutput, merge_metrics


class Fsdp2Engine:
    """See `hone.engines.base.BaseEngine`. `spec.total_steps == 0` makes an engine that only infers."""

    model: nn.Module
    weights: Weights
    optimizer: torch.optim.Optimizer
    schedule: Schedule

    def __init__(self, spec: EngineSpec, device: str) -> None:
        """Raises ValueError for settings that do not fit together; touches no weights yet."""
        self.model_type = spec.model_type
        self.device = device
        self._spec = spec
        self._trained = spec.total_steps > 0
        config = spec.engine
        self._max_tokens = config.max_tokens_per_microbatch
        self._compute = DTYPES[config.compute_dtype]
        self._chunk = config.logprob_chunk_tokens
        self._checkpointing = config.activation_checkpointing
        if spec.temperature <= 0:
            raise ValueError(f"temperature={spec.temperature} should be positive: greedy samples have no log-probs")
        if self._trained:
            self._optimizer_config, self._max_norm = config.optimizer, config.max_grad_norm
            self.schedule = Schedule(config.schedule, spec.total_steps)

    # ------------------------------------------------------------------------------------------------------- set-up

    def initialize(self) -> None:
        """Load or build the model, try it out (see `probe`), and make optimizer and schedule."""
        self.model = self._load()
        self.weights = Weights(self.model, self._compute, self._trained)
        self.model.to(self.device)
        if self.device == "cpu":
            fuse_norms(self.model)
        self._forward = self._checked_forward()
        if self._trained:
            if self._checkpointing:
                self._body.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": checkpoint_contexts})
            self.optimizer = build_optimizer(self._optimizer_config, self.weights.masters)
            self._lr = self.schedule.apply(self.optimizer, self._optimizer_config.lr)

    def _load(self) -> nn.Module:
        load: Any = load_value_model if self.model_type == "value_model" else load_language_model
        model: nn.Module = load(self._spec.model)
        return model

    def _checked_forward(self) -> Forward:
        name = self._spec.model.path or f"architecture {self._body.config.model_type!r}"
        self.model.eval()
        hidden = check_body(self._body, name)
        if self.model_type == "value_model":
            return value_forward(self.model)  # type: ignore[arg-type]
        check_head(self.model, hidden, name)
        return language_forward(self.model, self._spec.temperature, self._chunk)

    @property
    def _body(self) -> Any:
        return self.model.body if self.model_type == "value_model" else self.model.base_model

    # ----------------------------------------------------------------------------------------------------- training

    def train_batch(self, batch: Batch, loss: LossFn) -> Metrics:
        metrics = self.forward_backward(batch, loss)
        return merge_metrics(metrics, self.optimizer_step(), self.lr_scheduler_step())

    def forward_backward(self, batch: Batch, loss: LossFn) -> Metrics:
        """Accumulate gradients of the batch; `batch.loss_weights` is required.

        Returns the loss's metrics (means over the tokens with a loss) and `train/loss` (the sum). Raises ValueError
        for a sequence that is longer than the micro-batch budget.
        """
        if batch.loss_weights is None:
            raise ValueError("batch.loss_weights is not set: the loss has no denominator (see aggregation)")
        needs: frozenset[str] = getattr(loss, "needs", frozenset())
        parts = []
        with self.train_mode():
            for indices in cut_batch(batch, self._max_tokens):
                part = _on(select(batch, indices), self.device)
                if bool(part.loss_mask.any()):
                    parts.append(self._microbatch(part, loss, needs))
        return _step_metrics(parts)

    def _microbatch(self, part: Batch, loss: LossFn, needs: frozenset[str]) -> tuple[int, dict[str, Tensor]]:
        """One forward and backward; the number of trained tokens and the sums that the metrics are made from."""
        result = loss(self._forward(part, needs), part)
        mask = part.loss_mask
        assert part.loss_weights is not None
        total = (result.values * part.loss_weights)[mask].sum()
        total.backward()  # type: ignore[no-untyped-call]
        self.weights.collect()
        sums = {name: values.detach()[mask].sum() for name, values in result.metrics.items()}
        return int(mask.sum()), {"train/loss": total.detach(), **sums}

    def optimizer_step(self) -> Metrics:
        """Clip and step; a gradient norm that is not finite leaves weights and optimizer as they are."""
        norm = gradient_norm(self.weights.masters)
        finite = math.isfinite(norm)
        if finite:
            if self._max_norm is not None and norm > self._max_norm:
                scale_gradients(self.weights.masters, self._max_norm / norm)
            self.optimizer.step()
            self.weights.publish()
        self.weights.clear_gradients()
        metrics = {"train/lr": Metric.mean(self._lr), "train/skipped_steps": Metric.sum(0.0 if finite else 1.0)}
        return metrics | ({"train/grad_norm": Metric.mean(norm)} if finite else {})

    def lr_scheduler_step(self) -> Metrics:
        self.schedule.advance()
        self._lr = self.schedule.apply(self.optimizer, self._optimizer_config.lr)
        return {}

    # ---------------------------------------------------------------------------------------------------- inference

    def infer_batch(self, batch: Batch, needs: frozenset[str] = frozenset()) -> ModelOutput:
        cut = cut_batch(batch, self._max_tokens)
        with self.eval_mode(), torch.no_grad():
            outputs = [self._forward(_on(select(batch, indices), self.device), needs) for indices in cut]

        def joined(pick: Any) -> Tensor | None:
            found = [pick(output) for output in outputs]
            return None if found[0] is None else restore(found, cut, batch.cu_seqlens).to(batch.token_ids.device)

        extras = {name: joined(lambda output, name=name: output.extras[name]) for name in outputs[0].extras}
        return ModelOutput(
            logprobs=joined(lambda output: output.logprobs),
            entropy=joined(lambda output: output.entropy),
            values=joined(lambda output: output.values),
            extras={name: value for name, value in extras.items() if value is not None},
        )

    @contextmanager
    def _mode(self, training: bool) -> Iterator[None]:
        before = self.model.training
        if before != training:
            self.model.train(training)
        try:
            yield
        finally:
            if before != training:
                self.model.train(before)

    def train_mode(self) -> AbstractContextManager[None]:
        if not self._trained:
            raise RuntimeError("this engine was made with total_steps=0: it infers and is never trained")
        return self._mode(True)

    def eval_mode(self) -> AbstractContextManager[None]:
        return self._mode(False)

    # ------------------------------------------------------------------------------------------------ weights, state

    def get_per_tensor_param(self) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any] | None]:
        """Every entry of the model's state dict, in master precision; each tensor owns its storage."""
        return ((name, tensor.clone()) for name, tensor in self._state().items()), None

    def _state(self) -> dict[str, Tensor]:
        """Live tensors under the names of the model's state dict (tied weights under each of their names)."""
        state = {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
        of_storage = {state[name].data_ptr(): name for name in self.weights.names() if name in state}
        owners = {name: of_storage.get(tensor.data_ptr()) for name, tensor in state.items()}
        return {name: self.weights.best(owner) if owner else state[name] for name, owner in owners.items()}

    def to(self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move parts; the engine computes where its model is."""
        if model:
            for module in self.model.modules():
                for name, buffer in module._buffers.items():
                    module._buffers[name] = buffer.to(device) if buffer is not None else None
            self.device = device
        self.weights.move(device, model=model, optimizer=optimizer, grad=grad)
        if optimizer and self._trained:
            for state in self.optimizer.state.values():
                state |= {k: v.to(device) for k, v in state.items() if isinstance(v, Tensor) and v.dim()}

    def _saved(self) -> dict[str, Tensor]:
        """What a checkpoint holds of the model: each weight once, and persistent buffers."""
        state = self._state()
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        return {n: t for n, t in state.items() if n not in parameters or n in self.weights.names()}

    def save_checkpoint(self, folder: Path) -> None:
        names = {weight: name for name, weight in self.weights.masters.items()}
        tensors, plain = files.optimizer_state(self.optimizer, names)
        files.save_tensors(folder / files.MODEL_FILE, self._saved())
        files.save_tensors(folder / files.OPTIMIZER_FILE, tensors)
        facts = {
            "format": files.FORMAT,
            "optimizer": type(self.optimizer).__name__,
            "optimizer_numbers": plain,
            "schedule_step": self.schedule.step_count,
        }
        (folder / files.ENGINE_FILE).write_text(json.dumps(facts, indent=1), encoding="utf-8")

    def load_checkpoint(self, folder: Path) -> None:
        """Raises CheckpointError naming the file: missing, damaged, or of another model or optimizer."""
        facts = files.load_json(folder / files.ENGINE_FILE)
        mine = type(self.optimizer).__name__
        if facts["optimizer"] != mine:
            raise files.CheckpointError(
                f"{folder} was written with {facts['optimizer']}, this run's optimizer is {mine}"
            )
        tensors = files.load_tensors(folder / files.OPTIMIZER_FILE)
        files.fill(folder / files.MODEL_FILE, self._saved())
        files.restore_optimizer(self.optimizer, self.weights.masters, tensors, facts["optimizer_numbers"])
        self.weights.publish()
        self.schedule.step_count = facts["schedule_step"]
        self._lr = self.schedule.apply(self.optimizer, self._optimizer_config.lr)

    def export_hf(self, folder: Path) -> None:
        """Weights as they are computed with (compute_dtype), config and tokenizer."""
        with without_progress_bars():
            self.model.save_pretrained(folder)  # type: ignore[operator]
        load_tokenizer(self._spec.model).save_pretrained(folder)

    def disable_adapter(self) -> AbstractContextManager[None]:
        raise NotImplementedError("this engine trains all weights: there is no adapter to disable")

    @property
    def data_parallel_rank(self) -> int:
        return 0

    @property
    def data_parallel_size(self) -> int:
        return 1

    @property
    def is_output_rank(self) -> bool:
        return True


def _on(batch: Batch, device: str) -> Batch:
    """The batch with every tensor on a device."""
    if device == batch.token_ids.device.type:
        return batch
    changes: dict[str, Any] = {}
    for name in batch.__slots__:
        value = getattr(batch, name)
        if isinstance(value, Tensor):
            changes[name] = value.to(device, non_blocking=True)
        elif value is not None:
            changes[name] = {key: tensor.to(device, non_blocking=True) for key, tensor in value.items()}
    return batch.with_(**changes)


def _step_metrics(parts: list[tuple[int, dict[str, Tensor]]]) -> Metrics:
    """Metrics of a step from each micro-batch's token count and sums: one transfer from the device for all."""
    if not parts:
        return {"train/loss": Metric.sum(0.0)}
    names = list(parts[0][1])
    table = torch.stack([torch.stack([sums[name].double() for name in names]) for _, sums in parts]).tolist()
    merged: list[Metrics] = []
    for (count, _), row in zip(parts, table, strict=True):
        one = {name: Metric.mean(total / count, count) for name, total in zip(names, row, strict=True)}
        merged.append(one | {"train/loss": Metric.sum(row[0])})
    return merge_metrics(*merged)
