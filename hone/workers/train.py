"""Training roles: a worker group hosts the engine of each rank; a `TrainHandle` is the trainer's interface to all.

Algorithms and engines meet only here. A handle calls all workers of its `WorkerGroup`, in this process or by Ray.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig

from hone.engines.base import BaseEngine
from hone.engines.parts import PartlyGathered
from hone.engines.registry import EngineRegistry
from hone.engines.settings import EngineConfig
from hone.models.building import into_place
from hone.models.checkpoint_names import as_in_files
from hone.models.loading import check_model_source, folder_of
from hone.models.parts.boxes import BoxMap, from_text
from hone.models.parts.sources import boxes_before
from hone.models.settings import ModelConfig
from hone.platforms.base import compute_dtype, current_platform
from hone.runtime import ranks
from hone.runtime.base import WorkerGroup
from hone.types import Batch, LossFn, Metric, Metrics, ModelOutput, Need
from hone.weights.base import NamedTensor, RankWeights
from hone.weights.transports.ipc.rank_sender import Needs, Order, RankSender
from hone.workers.pace import Pace

RecordFn = Callable[[Metrics], None]
BLEND_BYTES = 256 * 2**20  # of the policy's weights in one call of `blend`
OWN_METRICS = ("critic", "process_reward")
"""Roles whose training metrics are recorded under their own name instead of `train/`."""


@dataclass(frozen=True, slots=True)
class TrainSpec:
    """Model, model type and training settings of a train worker."""

    model: ModelConfig
    engine: EngineConfig
    model_type: str = "language_model"
    temperature: float = 1.0  # of the rollout, so that log-probs describe the distribution that it samples from
    total_steps: int = 0  # optimizer steps of the whole run, for the schedule; 0: a model that is never trained
    driver_dtype: str = ""  # `compute_dtype` as the driver resolved it for the rollout; "": no driver
    reference: ModelConfig | None = None  # for "full_kl": the engine loads its head, the batch has its hidden states
    follows: bool = False  # never trained; `TrainHandle.follow` moves it towards the policy

    @property
    def replays_routes(self) -> bool:
        """Return whether training replays the experts recorded in a batch; inference never does."""
        return self.total_steps > 0 and self.engine.routing_replay != "none"


@dataclass(frozen=True, slots=True)
class WeightRequest:
    """Request for a stream of a model's weights."""

    part: Literal["merged", "base", "adapter"]  # all with the adapter merged, all without it, or the adapter alone
    dtype: torch.dtype | None  # None: in the trained precision
    in_files: bool = False  # in the layout of the model's files


class TrainWorker:
    """One rank of an actor, a critic or a reference model: the engine, and what only a rank of a run can do with it.

    A worker group calls methods of the engine itself, such as `save_checkpoint`, where the worker has none of the name.
    """

    def __init__(self, spec: TrainSpec) -> None:
        """Raises ValueError if `compute_dtype: auto` chooses another dtype on this rank than on the driver."""
        mine = compute_dtype(spec.engine.compute_dtype, current_platform())
        if spec.driver_dtype not in ("", mine):
            key = spec.engine.key_of("compute_dtype")
            raise ValueError(
                f"{key}: auto chooses {mine} on a rank ({current_platform().device_name()}) and {spec.driver_dtype} on "
                f"the machine that started the run; set {key}=bfloat16 or {key}=float32"
            )
        self._model = spec.model
        self._platform = current_platform()
        self.engine: BaseEngine = EngineRegistry.create(spec, self._platform)
        self._sender = RankSender()
        self._pace: Pace | None = None  # of a rank that is not alone
        self._boxes: tuple[Any, Sequence[BoxMap]] | None = None  # what was needed in the last sync, and of what

    def initialize(self) -> None:
        self.engine.initialize()
        if ranks.ranks() > 1:
            self._pace = Pace(self.engine, self._platform.device)
        self.release_memory()

    def release_memory(self) -> None:
        """Free the cached GPU memory of this process."""
        current_platform().empty_cache()

    def device_memory(self) -> Metrics:
        """Bytes of this rank's device: all, allocated by this process now and at most, added by the first step."""
        memory, needs = current_platform().memory(), self.engine.memory_needs()
        return {
            "total": Metric.min(memory.total),
            "allocated": Metric.max(memory.allocated),
            "peak": Metric.max(memory.peak),
            "kept": Metric.max(needs.kept),
            "training": Metric.max(needs.training),
        }

    @property
    def data_parallel_rank(self) -> int:
        return self.engine.ranks.data_parallel_rank

    @property
    def data_parallel_size(self) -> int:
        return self.engine.ranks.data_parallel_size

    @cached_property
    def equal_cost_length(self) -> float | None:
        """The sequence length at which attention costs as much as everything else; None: not known."""
        return equal_cost_length(check_model_source(self._model)) if self._model.path is not None else None

    @property
    def is_output_rank(self) -> bool:
        return self.engine.ranks.is_output_rank

    def train_batch(self, batch: Batch, loss: LossFn) -> Metrics:
        """One optimizer step on a mini-batch that carries its `loss_weights`."""
        with nullcontext() if self._pace is None else self._pace.timing():
            metrics = self.engine.train_batch(batch, loss)
        if self._platform.device != "cpu":  # or the optimizer's time on the device counts in the next phase
            self._platform.synchronize()
        return metrics if self._pace is None else metrics | self._pace.speeds(batch, self.equal_cost_length)

    def infer_batch(self, batch: Batch, needs: frozenset[Need] = frozenset(), adapter: bool = True) -> ModelOutput:
        """Log-probs (language model) or values (value model) of every token, and the outputs in `needs`; each [T].

        With `adapter=False`, a LoRA model uses its frozen weights only: the policy before training.
        """
        with nullcontext() if adapter else self.engine.disable_adapter():
            return self.engine.infer_batch(batch, needs)

    def weights(self, dtype: torch.dtype | None, in_files: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Stream every weight in `dtype` under its Hugging Face name; adapters are merged.

        Weights that the architecture keeps in float32 (router biases) stay in float32. None: in the trained precision.
        With `in_files`, in the layout of the model's files: experts that transformers fuses come one by one.
        """
        weights = self.engine.get_per_tensor_param(dtype=dtype)[0]
        return as_in_files(self._config, weights) if in_files else weights

    @cached_property
    def _config(self) -> Any:
        trusted = self._model.trust_remote_code
        return AutoConfig.from_pretrained(folder_of(self._model, weights=False), trust_remote_code=trusted)

    def base_weights(self, dtype: torch.dtype | None, in_files: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Stream every weight without the adapter; the rollout loads the adapter on top of them."""
        with self.engine.disable_adapter():
            yield from self.weights(dtype, in_files)

    def adapter(self, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Stream a LoRA adapter in `dtype` under PEFT's names. Raises ValueError without an adapter."""
        stream, _ = self.engine.get_per_tensor_param(adapter_only=True)
        for name, tensor in stream:
            yield name, tensor if dtype is None else tensor.to(dtype)

    def stream(self, request: WeightRequest) -> Iterator[NamedTensor]:
        """The weights of a request, tensor by tensor."""
        if request.part == "adapter":
            return self.adapter(request.dtype)
        if request.part == "base":
            return self.base_weights(request.dtype, request.in_files)
        return self.weights(request.dtype, request.in_files)

    def send_weights(self, order: Order, request: WeightRequest) -> list[Any]:
        """Carry out an order about the stream of a request, on every rank; return the answers of all ranks."""
        answer = self._sender.follow(order, ranks.rank(), lambda needs: self._needed(needs, request))
        return [json.loads(one) for one in ranks.exchange(json.dumps(answer).encode())]

    def _needed(self, needs: Needs, request: WeightRequest) -> Iterator[NamedTensor]:
        """Open the stream of a request. If the engine can, each rank gathers only the boxes that it sends."""
        weights = getattr(self.engine, "weights", None)
        less = any(text != "" for text in needs)
        merged = self.engine.adapter_config() is not None  # whole tensors, in master precision
        if not less or merged or not isinstance(weights, PartlyGathered):
            yield from self.stream(request)
            return
        in_files = request.in_files
        if self._boxes is None or self._boxes[0] != (needs, in_files):
            convert = partial(as_in_files, self._config) if in_files else iter
            maps = [None if text is None else from_text(text) for text in needs]
            self._boxes = (needs, in_files), boxes_before(weights.layout(), convert, maps)
        with weights.needed(self._boxes[1]):
            yield from self.stream(request)

    def export_hf(self, folder: Path) -> None:
        self.engine.export_hf(folder)

    def export_adapter(self, folder: Path) -> None:
        with into_place(folder, writes=self.engine.ranks.rank == 0) as partial:
            self.engine.export_adapter(partial)


def without_routes(batch: Batch) -> Batch:
    """Drop the recorded experts of a batch: they are most of its bytes, and only the actor uses them."""
    return batch.with_(routed_experts=None)


class GatheredWeights(RankWeights):
    """A stream of a worker group; each iteration opens it anew."""

    def __init__(self, group: WorkerGroup, request: WeightRequest) -> None:
        self._group = group
        self._request = request

    def __iter__(self) -> Iterator[NamedTensor]:
        return iter(self._group.call("stream", self._request))

    def order(self, order: Order) -> Sequence[Any]:
        answers: Sequence[Any] = self._group.call("send_weights", order, self._request)
        return answers


class TrainHandle:
    """The trainer's interface to an actor, critic or reference model."""

    def __init__(self, group: WorkerGroup, record: RecordFn, replays_routes: bool = False) -> None:
        """`replays_routes`: also send the recorded experts of a batch (`TrainSpec.replays_routes`)."""
        self.role, self.devices = group.role, group.devices
        self._replays_routes = replays_routes
        self.updates = 0  # how often its weights were changed
        self._group = group
        self._record = record

    def initialize(self) -> None:
        self._group.call("initialize")

    def release_memory(self) -> None:
        """Free the cached GPU memory of the workers, for a rollout on the same device."""
        self._group.call("release_memory")

    def device_memory(self) -> Metrics:
        """See `TrainWorker.device_memory`, of the rank that needs most."""
        metrics: Metrics = self._group.call("device_memory")
        return metrics

    def train_batch(self, batch: Batch, loss: LossFn) -> None:
        """Run one optimizer step and record its metrics; for `OWN_METRICS`, `train/` becomes the role's name."""
        self.updates += 1
        metrics: Metrics = self._group.call("train_batch", self._sent(batch), loss)
        if self.role in OWN_METRICS:
            metrics = {name.replace("train/", f"{self.role}/", 1): metric for name, metric in metrics.items()}
        self._record(metrics)

    def infer_batch(self, batch: Batch, needs: frozenset[Need] = frozenset(), adapter: bool = True) -> ModelOutput:
        """Log-probs or values of every sampled token, with a loss or without, and the outputs in `needs`; each [T].

        With `adapter=False`, a LoRA model uses its frozen weights only: the policy before training.
        """
        batch = batch.with_(loss_mask=batch.sampled_mask)
        sent = self._sent(batch) if adapter else without_routes(batch)  # replay is for the trained weights only
        output: ModelOutput = self._group.call("infer_batch", sent, needs, adapter)
        return output

    def _sent(self, batch: Batch) -> Batch:
        return batch if self._replays_routes else without_routes(batch)

    def weights(self, dtype: torch.dtype | None, in_files: bool = False) -> GatheredWeights:
        """Stream every weight; see `TrainWorker.weights`."""
        return GatheredWeights(self._group, WeightRequest("merged", dtype, in_files))

    def base_weights(self, dtype: torch.dtype, in_files: bool = False) -> GatheredWeights:
        """Stream every weight without the LoRA adapter; training never changes them."""
        return GatheredWeights(self._group, WeightRequest("base", dtype, in_files))

    def adapter(self, dtype: torch.dtype) -> GatheredWeights:
        """Stream the LoRA adapter under PEFT's names."""
        return GatheredWeights(self._group, WeightRequest("adapter", dtype))

    def adapter_config(self) -> dict[str, Any] | None:
        """PEFT's configuration of the LoRA adapter, as JSON values; None: the model has none."""
        config: dict[str, Any] | None = self._group.call("adapter_config")
        return config

    def follow(self, policy: TrainHandle, mixup: float) -> None:
        """Move every weight towards the policy's: mixup * policy + (1 - mixup) * own. Needs `TrainSpec.follows`."""
        self.updates += 1
        chunk: dict[str, torch.Tensor] = {}
        for name, tensor in policy.weights(None):
            chunk[name] = tensor
            if sum(one.nbytes for one in chunk.values()) >= BLEND_BYTES:
                self._group.call("blend", chunk, mixup)
                chunk = {}
        self._group.call("blend", chunk, mixup)

    def save_checkpoint(self, folder: Path) -> None:
        """Copy the state to save; it is written into `folder` while training goes on."""
        self._group.call("save_checkpoint", folder, False)

    def checkpoint_written(self, wait: bool) -> bool:
        """Return whether the checkpoint is on disk; `wait`: wait for it. Raises OSError if it cannot be written."""
        written: bool = self._group.call("checkpoint_written", wait)
        return written

    def load_checkpoint(self, folder: Path) -> None:
        self.updates += 1
        self._group.call("load_checkpoint", folder)

    def export(self, folder: Path, adapter: Path) -> None:
        """Write the whole model to `folder`, a new one, and a LoRA adapter also to `adapter`."""
        self._group.call("export_hf", folder)
        if self.adapter_config() is not None:
            self._group.call("export_adapter", adapter)


def equal_cost_length(config: Mapping[str, Any]) -> float | None:
    """The sequence length at which causal attention costs as many operations as everything else in a transformer.

    Per token, each weight costs two operations, and causal attention over L tokens costs 2 L x heads x head size per
    layer on average. `config` is the content of config.json; None if it lacks one of the sizes.
    """
    text: Mapping[str, Any] = config.get("text_config", config)
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    if not all(isinstance(text.get(name), int) for name in names):
        return None
    hidden, layers, heads, inner, vocabulary = (int(text[name]) for name in names)
    head = text.get("head_dim") or hidden // heads
    keys = text.get("num_key_value_heads") or heads
    experts = text.get("num_experts_per_tok") or 1
    mlp = 3 * hidden * (experts * (text.get("moe_intermediate_size") or inner) if experts > 1 else inner)
    weights = layers * (2 * hidden * head * (heads + keys) + mlp) + hidden * vocabulary
    return weights / (layers * heads * head)
