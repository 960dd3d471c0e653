"""The `fsdp2` engine: any Hugging Face causal language model, or a value model on its body, in plain PyTorch.

    Batch --microbatches--> packed forward --LossFn--> sum(values * loss_weights) --backward--> gradients   (repeated)
                                                                                      |
    working weights (compute_dtype) <--publish-- masters <--optimizer, if the norm is finite--

On one process or on a mesh of many (see `mesh`): the loss weights carry the denominator of the whole step and gradients
are sums, so neither how a batch was cut nor how it was spread changes them. Weights are reached through `Weights` or
`ShardedWeights`; every rank of a mesh makes the same calls, for each is a meeting of all.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hone.data.packed_images import images_on
from hone.data.packing import restore, select
from hone.engines import checkpoint as files
from hone.engines.activations import kept_in_cpu_memory, recompute_layers
from hone.engines.adapter_files import base_identity, check_base, write_adapter
from hone.engines.base import EngineSpec
from hone.engines.export import export_weights, in_dtype
from hone.engines.forward import Forward, head_of_reference, language_forward, value_forward
from hone.engines.layout import cut_batch
from hone.engines.logprobs import Head
from hone.engines.mesh import Mesh, open_mesh
from hone.engines.moe import LOADS, Experts, open_experts
from hone.engines.optimizers import build_optimizer, scale_gradients
from hone.engines.precision import Weights, kept_wide
from hone.engines.probe import check_body, check_head, check_images, try_body
from hone.engines.schedules import Schedule
from hone.engines.sharded_weights import ShardedWeights
from hone.engines.sharding import (
    BUCKET_BYTES,
    Sharder,
    inside,
    later,
    nothing,
    sharded_forward,
    whole_weight,
    whole_weights,
)
from hone.engines.shards import Part, Shard, gather
from hone.engines.writing import Writer
from hone.models.four_bit import plain_weights
from hone.models.fused_norm import fuse_norms
from hone.models.image_processor import save_language
from hone.models.loading import DTYPES, load_language_model, load_value_model, without_progress_bars
from hone.models.transformers_patches import ShardFn
from hone.platforms.base import current_platform
from hone.registry import resolve
from hone.types import Batch, BatchImages, LossFn, Metric, Metrics, ModelOutput, merge_metrics

if TYPE_CHECKING:
    from hone.engines.lora import Adapter


class Fsdp2Engine:
    """See `hone.engines.base.BaseEngine`. `spec.total_steps == 0` makes an engine that only infers."""

    model: nn.Module
    weights: Weights | ShardedWeights
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    _experts: Experts | None  # of a mixture of experts

    def __init__(self, spec: EngineSpec, device: str) -> None:
        """Raises ValueError for settings that do not fit together; touches no weights yet."""
        self.model_type = spec.model_type
        self.device = self._home = device
        self._spec = spec
        self._trained = spec.total_steps > 0
        config = spec.engine
        self._max_tokens = config.max_tokens_per_microbatch
        self._compute = DTYPES[config.compute_dtype]
        self._chunk = config.logprob_chunk_tokens
        self._checkpointing = config.activation_checkpointing
        if config.lora is not None and config.lora.quantise is not None and config.compute_dtype == "float64":
            raise ValueError("engine.lora.quantise: 4 bits are made of 16 or 32; compute_dtype=float64 does not fit")
        self.mesh = open_mesh(config.parallel, device)
        self._offload = config.offload
        self._writer = Writer()
        self.adapter: Adapter | None = None
        if config.lora is not None:  # PEFT is imported by runs that need it only
            make = resolve("hone.engines.lora:Adapter")
            self.adapter = make(config.lora, spec.model, DTYPES[spec.model.dtype])
        self._drawn = 0  # micro-batches since the last optimizer step
        self._at_work: frozenset[str] = frozenset()  # with `offload`: what is on the device now
        if spec.temperature <= 0:
            raise ValueError(f"temperature={spec.temperature} should be positive: greedy samples have no log-probs")
        if self._trained:
            self._optimizer_config, self._max_norm = config.optimizer, config.max_grad_norm
            self.schedule = Schedule(config.schedule, spec.total_steps)

    # ------------------------------------------------------------------------------------------------------- set-up

    def initialize(self) -> None:
        """Load or build the model, try it out (see `probe`), and make optimizer and schedule."""
        self._forward = self._prepare() if self.mesh is None else self._prepare_sharded(self.mesh)
        if self._trained:
            if self._checkpointing:
                recompute_layers(self._body)
            self.optimizer = build_optimizer(
                self._optimizer_config, self.weights.masters, in_parts=self.mesh is not None
            )
            self._lr = self.schedule.apply(self.optimizer, self._optimizer_config.lr)
        if self._offload:
            self.to("cpu")

    def _prepare(self) -> Forward:
        self.model = self._load(None)
        if self.adapter is not None:
            adapted: Any = self.model.body if self.model_type == "value_model" else self.model
            self.adapter.attach(adapted, self._name(adapted))
            self.adapter.fill(self.model, self._prefix, "cpu", lambda name, weight: weight.detach(), None)
        self.weights = Weights(self.model, self._compute, self._trained, self._adapter_names)
        self.model.to(self.device)
        if self.device == "cpu":
            fuse_norms(self.model)
        return self._checked_forward()

    def _prepare_sharded(self, mesh: Mesh) -> Forward:
        sharder = Sharder(mesh, DTYPES[self._spec.model.dtype], self._compute, self.adapter)
        self.model = self._load(lambda model: sharder.shard(model, self._name(model)))
        self.model.to(self.device)
        if self.adapter is not None:
            self.adapter.show()
            self.adapter.fill(self.model, self._prefix, self.device, functools.partial(whole_weight, mesh=mesh), mesh)
        sharder.wrap(self.model)
        if self.device == "cpu":
            fuse_norms(self.model)
        forward = inside(self.model, self._checked_forward)
        self.model.reshard()  # type: ignore[operator]
        self.weights = ShardedWeights(self.model, mesh, self._trained, sharder.partial)
        return sharded_forward(self.model, forward, mesh)

    def _load(self, shard: ShardFn | None) -> nn.Module:
        spec = self._spec
        if self.adapter is None:
            load: Any = load_value_model if self.model_type == "value_model" else load_language_model
            model: nn.Module = load(spec.model, shard)
            return model
        frozen = spec.model.model_copy(update={"dtype": spec.engine.compute_dtype})  # nothing updates these weights
        four_bit = self.adapter.four_bit
        if self.model_type == "value_model":
            return load_value_model(frozen, shard, DTYPES[spec.model.dtype], four_bit)
        return load_language_model(frozen, shard, four_bit)

    def _name(self, model: Any) -> str:
        return self._spec.model.path or f"architecture {model.config.model_type!r}"

    def _checked_forward(self) -> Forward:
        name = self._name(self._body)
        self.model.eval()
        hidden = check_body(self._body, name)
        check_images(self._body, name)
        moe = self._spec.engine.moe if self._trained else None  # a model that is only asked routes as it does
        self._experts = open_experts(self._body, moe, name, lambda: try_body(self._body))
        if self.model_type == "value_model":
            return value_forward(self.model, self._experts)  # type: ignore[arg-type]
        check_head(self.model, hidden, name)
        reference, compute = self._spec.reference, self._spec.engine.compute_dtype
        head = None if reference is None else head_of_reference(reference, compute, self.device)
        if self.adapter is not None and reference == self._spec.model:
            lora = self._spec.engine.lora
            if lora is not None and lora.path and hasattr(self.model.get_output_embeddings(), "active"):
                raise ValueError(
                    f"algorithm.kl.kind: full needs the head of the policy before training, and the one that "
                    f"engine.lora.path={lora.path} brings is trained on; choose another kind"
                )
            head = self._base_head
        return language_forward(self.model, self._spec.temperature, self._chunk, head, self._experts)

    def _base_head(self) -> Head:
        """That of the policy before training."""
        with self.disable_adapter():
            return Head.of(self.model)

    @property
    def _prefix(self) -> str:
        """Of the names of an adapted model's weights in this one's state dict."""
        return "body." if self.model_type == "value_model" else ""

    @property
    def _adapter_names(self) -> frozenset[str]:
        return frozenset() if self.adapter is None else frozenset(self.adapter.names)

    @property
    def _body(self) -> Any:
        return self.model.body if self.model_type == "value_model" else self.model.base_model

    # ----------------------------------------------------------------------------------------------------- training

    def train_batch(self, batch: Batch, loss: LossFn) -> Metrics:
        with self.train_mode():
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
        if self._experts is not None:
            self._experts.check_routes(batch, trained=True)
            needs |= self._experts.needs
        cut = cut_batch(batch, self._max_tokens, whole_groups=getattr(loss, "whole_groups", False))
        trained = _has_loss(batch)
        cut = [indices for indices in cut if any(trained[i] for i in indices)]
        missing = self._missing(len(cut))
        with self.train_mode():
            if self._experts is not None and self._experts.counts_first:
                self._count_loads(self._experts, batch, cut, missing)
            parts = [self._microbatch(_on(select(batch, indices), self.device), loss, needs) for indices in cut]
            for _ in range(missing):
                sum(self._idle()).backward()  # type: ignore[union-attr]
            if missing:  # this rank's share of the weights has gradients, from the other ranks' sequences
                self.weights.collect()
            of_experts = self._experts.end(self.mesh, self.device) if self._experts is not None else {}
        return _step_metrics(parts) | of_experts

    @torch.no_grad()
    def _count_loads(self, experts: Experts, batch: Batch, cut: list[list[int]], missing: int) -> None:
        """A forward of the whole step for how often each expert is taken in it."""
        for indices in cut:
            self._forward(_on(select(batch, indices), self.device), frozenset({LOADS}))
        for _ in range(missing):
            self._idle()
        experts.begin(self.mesh, self.device)

    def _missing(self, microbatches: int) -> int:
        """How many micro-batches some other rank has more than this one: every rank has to join its collectives."""
        return self.mesh.most(microbatches, self.device) - microbatches if self.mesh else 0

    def _idle(self) -> list[Tensor]:
        """A forward that gives zeros, connected to every weight."""
        assert self.mesh is not None
        output = self._forward(_on(nothing(self.mesh.sizes.sequence), self.device), frozenset())
        return [(value * 0).sum() for value in (output.logprobs, output.values) if value is not None]

    def _microbatch(self, part: Batch, loss: LossFn, needs: frozenset[str]) -> dict[str, Tensor]:
        """One forward and backward; each metric as [3]: sum, number of tokens, 0; or maximum, number of tokens, 1."""
        with kept_in_cpu_memory() if self._checkpointing == "offload" else nullcontext(), self._dropping():
            output = self._forward(part, needs)
        result = loss(output, part)
        of_experts, shown = self._experts.penalty(output.extras) if self._experts is not None else (0.0, {})
        mask = part.loss_mask
        assert part.loss_weights is not None
        total = ((result.values + of_experts) * part.loss_weights)[mask].sum()
        total.backward()  # type: ignore[no-untyped-call]
        self.weights.collect()
        sums = {"train/loss": _row(total.detach(), mask, largest=False)}
        for name, values in {**result.metrics, **shown}.items():
            counted = result.counted.get(name, mask)
            sums[name] = _row(values.detach()[counted].sum(), counted, largest=False)
        for name, values in result.largest.items():
            sums[name] = _row(values.detach()[mask].max(), mask, largest=True)
        return sums

    def _dropping(self) -> AbstractContextManager[None]:
        """An adapter's dropout: ranks that share a micro-batch drop alike, and a resumed run as if it never stopped."""
        if self.adapter is None:
            return nullcontext()
        self._drawn += 1
        return self.adapter.dropping(self.device, self.schedule.step_count, self._drawn, self.data_parallel_rank)

    def optimizer_step(self) -> Metrics:
        """Clip and step; a gradient norm that is not finite leaves weights and optimizer as they are."""
        self._drawn = 0
        self.weights.settle()
        norm = self.weights.gradient_norm()
        finite = math.isfinite(norm)
        if finite:
            if self._max_norm is not None and norm > self._max_norm:
                scale_gradients(self.weights.masters, self._max_norm / norm)
            self.optimizer.step()
            self.weights.publish()
        self.weights.clear_gradients()
        skipped = not finite and self.data_parallel_rank == 0  # one for all ranks: their metrics are added up
        metrics = {"train/lr": Metric.mean(self._lr), "train/skipped_steps": Metric.sum(float(skipped))}
        return metrics | ({"train/grad_norm": Metric.mean(norm)} if finite else {})

    def lr_scheduler_step(self) -> Metrics:
        self.schedule.advance()
        self._lr = self.schedule.apply(self.optimizer, self._optimizer_config.lr)
        return {}

    # ---------------------------------------------------------------------------------------------------- inference

    def infer_batch(self, batch: Batch, needs: frozenset[str] = frozenset()) -> ModelOutput:
        if self._experts is not None:
            self._experts.check_routes(batch, trained=False)
        cut = cut_batch(batch, self._max_tokens)
        missing = self._missing(len(cut))
        with self.eval_mode(), torch.no_grad():
            outputs = [self._forward(_on(select(batch, indices), self.device), needs) for indices in cut]
            for _ in range(missing):
                self._idle()
        if self.mesh:
            self.model.reshard()  # type: ignore[operator]

        if not outputs:  # a rank without sequences
            return ModelOutput()

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
        with self._at_device(frozenset({"model", "optimizer", "grad"} if training else {"model"})):
            if before != training:
                self.model.train(training)
            try:
                yield
            finally:
                if before != training:
                    self.model.train(before)

    @contextmanager
    def _at_device(self, parts: frozenset[str]) -> Iterator[None]:
        """With `offload`, parts that are not on the device yet are brought there, and taken away again."""
        missing = parts - self._at_work if self._offload else frozenset()
        if not missing:
            yield
            return
        self.to(self._home, **{part: part in missing for part in ("model", "optimizer", "grad")})
        self._at_work |= missing
        try:
            yield
        finally:
            self._at_work -= missing
            self.to("cpu", **{part: part in missing for part in ("model", "optimizer", "grad")})

    def train_mode(self) -> AbstractContextManager[None]:
        if not self._trained:
            raise RuntimeError("this engine was made with total_steps=0: it infers and is never trained")
        return self._mode(True)

    def eval_mode(self) -> AbstractContextManager[None]:
        return self._mode(False)

    # ------------------------------------------------------------------------------------------------ weights, state

    def get_per_tensor_param(
        self, adapter_only: bool = False
    ) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any] | None]:
        """Every entry of the model's state dict, in master precision; each tensor owns its storage.

        On a mesh every rank gets whole tensors, and every rank has to take all of them. Weights beside an adapter are
        kept in compute precision; those that it changes come merged, added up in master precision.
        """
        if adapter_only:
            adapter = self._require_adapter()
            return later(lambda: adapter.file_tensors(self._adapter_tensors())), adapter.file_config()
        return self._all_weights(), None

    def _all_weights(self) -> Iterator[tuple[str, Tensor]]:
        plain: Iterator[tuple[str, Tensor]]
        if self.mesh is not None:
            plain = whole_weights(self.model, self.weights)
        else:
            plain = ((name, tensor.clone()) for name, tensor in self._state().items())
        if self.adapter is None:
            return plain
        adapter = self.adapter
        return later(lambda: adapter.merged(plain_weights(self.model, plain), self._adapter_tensors()))

    def _adapter_tensors(self) -> dict[str, Tensor]:
        """The adapter's tensors, whole; each owns its storage."""
        names = self._adapter_names
        return dict(gather((part for part in self.weights.parts() if part[0] in names), BUCKET_BYTES))

    def _require_adapter(self) -> Adapter:
        if self.adapter is None:
            raise ValueError("this engine trains all weights: it has no adapter (engine.lora is not set)")
        return self.adapter

    def adapter_config(self) -> dict[str, Any] | None:
        return None if self.adapter is None else self.adapter.file_config()

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
        if device == "cpu" != self._home:
            current_platform().empty_cache()  # else the allocator keeps the room from everybody else

    def _saved(self) -> list[Part]:
        """What a checkpoint holds of the model: each weight once, and persistent buffers; not what is frozen."""
        if self.adapter is not None:
            kept = self._adapter_names | self.weights.masters.keys()
            return [part for part in self.weights.parts() if part[0] in kept]
        parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        buffers = [(name, one) for name, one in self.model.state_dict().items() if name not in parameters]
        first = self.mesh is None or self.mesh.rank == 0
        return [*self.weights.parts(), *((n, one, Shard(tuple(one.shape), (), 1, first)) for n, one in buffers)]

    def _trained_parts(self) -> list[Part]:
        shards = {name: shard for name, _, shard in self.weights.parts()}
        return [(name, master, shards[name]) for name, master in self.weights.masters.items()]

    def save_checkpoint(self, folder: Path, wait: bool = True) -> None:
        rank, ranks = (self.mesh.rank, self.mesh.sizes.world) if self.mesh else (0, 1)
        tensors, plain = files.optimizer_parts(self.optimizer, self._trained_parts(), rank == 0)
        self._writer.start(
            [
                files.snapshot(folder / files.part_file(files.MODEL, rank, ranks), self._saved()),
                files.snapshot(folder / files.part_file(files.OPTIMIZER, rank, ranks), tensors),
            ]
        )
        facts = {
            "format": files.FORMAT,
            "ranks": ranks,
            "optimizer": type(self.optimizer).__name__,
            "optimizer_numbers": plain,
            "schedule_step": self.schedule.step_count,
            "adapter": None,
        }
        if self.adapter is not None:
            facts["adapter"] = {**self.adapter.facts(), "base": self._base}
        if rank == 0:
            (folder / files.ENGINE_FILE).write_text(json.dumps(facts, indent=1), encoding="utf-8")
        if wait:
            self.checkpoint_written(wait=True)

    def checkpoint_written(self, wait: bool = False) -> bool:
        done = self._writer.done(wait)
        return done if self.mesh is None else self.mesh.most(int(not done), self.device) == 0

    def load_checkpoint(self, folder: Path) -> None:
        """Raises CheckpointError naming the file: missing, damaged, or of another model or optimizer."""
        facts = files.load_json(folder / files.ENGINE_FILE)
        self._check_adapter(facts.get("adapter"), folder)
        mine = type(self.optimizer).__name__
        if facts["optimizer"] != mine:
            raise files.CheckpointError(
                f"{folder} was written with {facts['optimizer']}, this run's optimizer is {mine}"
            )
        model, optimizer = (files.PartsReader(folder, kind, facts["ranks"]) for kind in (files.MODEL, files.OPTIMIZER))
        tensors = files.read_all(model, self._saved())
        numbers = facts["optimizer_numbers"]
        state = files.read_optimizer(optimizer, self._trained_parts(), numbers, self.optimizer)
        for live, stored in tensors:
            live.copy_(stored)
        self.optimizer.state.clear()
        self.optimizer.state.update(state)
        self.weights.publish()
        self.schedule.step_count = facts["schedule_step"]
        self._lr = self.schedule.apply(self.optimizer, self._optimizer_config.lr)

    @functools.cached_property
    def _base(self) -> dict[str, Any]:
        return base_identity(self._spec.model)

    def _check_adapter(self, stored: dict[str, Any] | None, folder: Path) -> None:
        """Raise CheckpointError if a checkpoint's adapter is not this run's, or lies beside other weights."""
        mine = None if self.adapter is None else self.adapter.facts()
        theirs = None if stored is None else {key: value for key, value in stored.items() if key != "base"}
        if mine != theirs:
            said = ["an adapter " + str(one) if one else "no adapter" for one in (theirs, mine)]
            raise files.CheckpointError(f"{folder} was written with {said[0]}, this run has {said[1]}")
        if stored is not None:
            check_base(stored["base"], self._base, folder)

    def export_adapter(self, folder: Path) -> None:
        tensors, config = self.get_per_tensor_param(adapter_only=True)
        head = dict(gather((part for part in self.weights.parts() if part[0] == "score.weight"), BUCKET_BYTES))
        first = self.mesh is None or self.mesh.rank == 0
        write_adapter(folder, config or {}, tensors, head, writes=first)
        if first:
            save_language(self._spec.model, folder)
        if self.mesh:
            self.mesh.meet()

    def export_hf(self, folder: Path) -> None:
        """Weights as they are computed with (compute_dtype), an adapter merged in; config and tokenizer."""
        if self.mesh or self.adapter is not None:
            weights = in_dtype(self._all_weights(), self._compute, kept_wide(self.model))
            export_weights(self.model, weights, folder, writes=self.mesh is None or self.mesh.rank == 0)
        else:
            with without_progress_bars():
                self.model.save_pretrained(folder)  # type: ignore[operator]
        if self.mesh is None or self.mesh.rank == 0:
            save_language(self._spec.model, folder)
        if self.mesh:
            self.mesh.meet()

    def disable_adapter(self) -> AbstractContextManager[None]:
        return self._require_adapter().disabled()

    @property
    def data_parallel_rank(self) -> int:
        return self.mesh.data_parallel_rank if self.mesh else 0

    @property
    def data_parallel_size(self) -> int:
        return self.mesh.data_parallel_size if self.mesh else 1

    @property
    def is_output_rank(self) -> bool:
        return self.mesh is None or self.mesh.is_output_rank


def _has_loss(batch: Batch) -> list[bool]:
    """For each sequence, whether it has a token with a loss."""
    before = torch.nn.functional.pad(batch.loss_mask.cumsum(0), (1, 0))[batch.cu_seqlens]
    return (before[1:] > before[:-1]).tolist()


def _on(batch: Batch, device: str) -> Batch:
    """The batch with every tensor on a device."""
    if device == batch.token_ids.device.type:
        return batch
    changes: dict[str, Any] = {}
    for name in batch.__slots__:
        value = getattr(batch, name)
        if isinstance(value, Tensor):
            changes[name] = value.to(device, non_blocking=True)
        elif isinstance(value, BatchImages):
            changes[name] = images_on(value, device)
        elif isinstance(value, Mapping):
            changes[name] = {key: tensor.to(device, non_blocking=True) for key, tensor in value.items()}
    return batch.with_(**changes)


def _step_metrics(parts: list[dict[str, Tensor]]) -> Metrics:
    """Metrics of a step from each micro-batch's sums and counts: one transfer from the device for all."""
    if not parts:
        return {"train/loss": Metric.sum(0.0)}
    names = list(parts[0])
    table = torch.stack([torch.stack([sums[name] for name in names]) for sums in parts]).tolist()
    merged: list[Metrics] = []
    for row in table:
        found = dict(zip(names, row, strict=True))
        one = {
            name: Metric.max(total) if largest else Metric.mean(total / count, count)
            for name, (total, count, largest) in found.items()
            if count
        }
        merged.append(one | {"train/loss": Metric.sum(found["train/loss"][0])})
    return merge_metrics(*merged)


def _row(value: Tensor, counted: Tensor, largest: bool) -> Tensor:
    return torch.stack([value.double(), counted.sum().double(), torch.full_like(value, largest, dtype=torch.float64)])
