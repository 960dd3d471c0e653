"""The engine that every backend shares: steps over micro-batches, updates, weights under their names, checkpoints.

    Batch --microbatches--> forward --LossFn--> sum(values * loss_weights) --backward--> gradients   (repeated)
                                                                                 |
    working weights (compute_dtype) <--publish-- masters <--optimizer, if the norm is finite

A gradient does not depend on how a batch was cut or distributed: the loss weights carry the denominator of the whole
optimizer step, and gradients are sums over micro-batches and ranks.

A backend derives from `Engine` and supplies `_build` (model, weights, forward), its ranks, and where its parts lie.
Every rank makes the same calls, because most of them contain collectives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hone.data.packed_images import images_on
from hone.data.packing import groups_of, restore, select
from hone.engines.base import EngineSpec, MemoryNeeds, Ranks
from hone.engines.checkpoint.engine_state import Checkpoint, require_dtype
from hone.engines.export import export_weights
from hone.engines.forward import Forward
from hone.engines.layout import cut_batch
from hone.engines.lora.adapter_files import write_adapter
from hone.engines.moe import LOADS, Experts
from hone.engines.optimizers import Update
from hone.engines.parts import Part, Weights, Whole, blend_parts
from hone.models.dropout import seeded
from hone.models.four_bit import plain_weights
from hone.models.loading import DTYPES
from hone.models.numerics.precision import in_dtype, wide_weights
from hone.models.numerics.products import prepare
from hone.models.value_head import SCORE
from hone.models.vision.image_processor import save_language
from hone.platforms.base import AUTO, compute_dtype, current_platform
from hone.registry import resolve
from hone.types import Batch, BatchImages, LossFn, Metric, Metrics, ModelOutput, Need, merge_metrics

if TYPE_CHECKING:
    from hone.engines.lora.adapter import Adapter


class Engine(ABC):
    """See `hone.engines.base.BaseEngine`. `spec.total_steps == 0` makes an engine that only infers."""

    model: nn.Module
    weights: Weights
    update: Update  # of an engine that trains
    experts: Experts | None = None  # of a mixture of experts
    offloads = False  # whether parts wait in CPU memory (`hone.engines.memory.OffloadingEngine`)
    cuts_weights = False  # whether masters are parts of weights even in one process

    def __init__(self, spec: EngineSpec, device: str, ranks: Ranks) -> None:
        """Raises ValueError for settings that do not fit together; loads no weights yet."""
        config = spec.engine
        if spec.temperature <= 0:
            raise ValueError(f"temperature={spec.temperature} should be positive: greedy samples have no log-probs")
        if config.lora is not None and config.lora.quantise is not None and config.compute_dtype == "float64":
            raise ValueError(f"{config.lora.key_of('quantise')} needs compute_dtype bfloat16 or float32, not float64")
        self.spec, self.model_type = spec, spec.model_type
        self.device, self.ranks = device, ranks
        self._packing = spec.engine.packed_tokens(0, device), spec.engine.token_limit
        self.compute_dtype = compute_dtype(config.compute_dtype, current_platform())
        self.compute = DTYPES[self.compute_dtype]
        prepare(self.compute, device)
        self.trained = spec.total_steps > 0
        if self.trained:
            self.update = Update(config, spec.total_steps, ranks.world > 1, in_buffers=self.cuts_weights)
        self.adapter: Adapter | None = None
        if config.lora is not None:  # PEFT is imported only by runs that need it
            self.adapter = resolve("hone.engines.lora.adapter:Adapter")(config.lora, spec.model)
        self._drops = spec.model.used.dropout or (config.lora is not None and config.lora.dropout > 0)
        self._drawn = 0  # micro-batches since the last optimizer step

    @abstractmethod
    def _build(self) -> Forward:
        """Load the model and set `model`, `weights` and `experts`."""

    def _on_device(self, parts: frozenset[str]) -> AbstractContextManager[None]:
        """Have `parts` ("model", "optimizer", "grad") on the device."""
        return self._brought(parts) if self.offloads else nullcontext()

    def _brought(self, parts: frozenset[str]) -> AbstractContextManager[None]:
        raise NotImplementedError

    @property
    def _head_dtype(self) -> torch.dtype | None:
        """The dtype of the product with the head's weights; None: theirs."""
        return torch.promote_types(self.compute, torch.float32) if self.spec.engine.head_dtype is not None else None

    def initialize(self) -> None:
        """Load or build the model, and make optimizer and schedule."""
        self.forward = self._build()
        if self.trained:
            self.update.start(self.weights)
        if self.trained or self.spec.follows:
            update = self.update if self.trained else None
            self._checkpoint = Checkpoint(
                self.ranks, self.device, update, self.weights, self.adapter, self.compute_dtype
            )

    # ------------------------------------------------------------------------------------------------------ training

    def train_batch(self, batch: Batch, loss: LossFn) -> Metrics:
        with self.train_mode():
            metrics = self.forward_backward(batch, loss)
            return merge_metrics(metrics, self.optimizer_step(), self.lr_scheduler_step())

    def forward_backward(self, batch: Batch, loss: LossFn) -> Metrics:
        """Accumulate gradients of the batch; `batch.loss_weights` is required.

        Returns the loss's metrics (means over the tokens with a loss) and `train/loss` (the sum). Raises ValueError
        for a sequence that is longer than the micro-batch budget.
        """
        step, experts = ScoredStep(loss, self.experts), self.experts
        cut, still = _cut_for_training(batch, self._packing, loss, step.splits and not self._drops)
        if experts is not None:
            experts.expect(batch, self.ranks, self.device)
        with self.train_mode():
            if experts is not None and experts.counts_first:
                self._infer(batch, cut, frozenset({LOADS}))
                experts.begin(self.ranks, self.device)
            self._train(batch, cut, step)
            if still is not None:  # on every rank alike, because of the collectives
                step.add_still(self._infer(batch, still, step.needs), batch, still, self.device)
            of_experts = experts.end(self.ranks, self.device) if experts is not None else {}
        return step.metrics() | of_experts

    def _train(self, batch: Batch, cut: list[list[int]], step: ScoredStep) -> None:
        """Forward and backward of each micro-batch; a backend with a pipeline overrides this and `_infer`."""
        missing = self._missing(cut)
        for indices in cut:
            part = on_device(select(batch, indices), self.device)
            with self._dropping():
                output = self.forward(part, step.needs)
            step.total(output, part).backward()
            self.weights.collect()
        for _ in range(missing):
            self._idle().backward()
        if missing:  # this rank's part of the weights has gradients from the other ranks' sequences
            self.weights.collect()

    @torch.no_grad()
    def _infer(self, batch: Batch, cut: list[list[int]], needs: frozenset[Need]) -> list[ModelOutput]:
        missing = self._missing(cut)
        outputs = [self.forward(on_device(select(batch, indices), self.device), needs) for indices in cut]
        for _ in range(missing):
            self._idle()
        return outputs

    def _missing(self, cut: list[list[int]]) -> int:
        """Return another rank's extra micro-batches; this rank joins their collectives. Call it before the first."""
        return self.ranks.most(len(cut), self.device) - len(cut) if self.ranks.world > 1 else 0

    def _idle(self) -> Tensor:
        """A forward with a loss of zero that depends on every weight."""
        return zero_of(self.forward(on_device(idle_batch(self.ranks.token_ranks), self.device), frozenset()))

    def _dropping(self) -> AbstractContextManager[None]:
        """Seed a micro-batch's dropout, the adapter's and the model's (see `seeded`)."""
        if not self._drops:
            return nullcontext()
        self._drawn += 1
        seed = 0 if (lora := self.spec.engine.lora) is None else lora.seed
        return seeded(self.device, seed, self.update.schedule.step_count, self._drawn, self.ranks.data_parallel_rank)

    def optimizer_step(self) -> Metrics:
        self._drawn = 0
        return self.update.step(self.weights, self.ranks)

    def lr_scheduler_step(self) -> Metrics:
        self.update.advance()
        return {}

    def infer_batch(self, batch: Batch, needs: frozenset[Need] = frozenset()) -> ModelOutput:
        if self.experts is not None:
            self.experts.check_routes(batch, trained=False)
        cut = cut_batch(batch, _budget(batch, self._packing))
        with self.eval_mode():
            return _joined(self._infer(batch, cut, needs), cut, batch)

    def train_mode(self) -> AbstractContextManager[None]:
        if not self.trained:
            raise RuntimeError("this engine was made with total_steps=0: it infers and is never trained")
        return self._mode(True)

    def eval_mode(self) -> AbstractContextManager[None]:
        return self._mode(False)

    @contextmanager
    def _mode(self, training: bool) -> Iterator[None]:
        before = self.model.training
        with self._on_device(frozenset({"model", "optimizer", "grad"} if training else {"model"})):
            if before != training:
                self.model.train(training)
            try:
                yield
            finally:
                if before != training:
                    self.model.train(before)

    # ------------------------------------------------------------------------------------------------- weights, files

    def get_per_tensor_param(
        self, adapter_only: bool = False, dtype: torch.dtype | None = None
    ) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any] | None]:
        """See `BaseEngine`; weights come in master precision, or as a model that computes in `dtype` holds them.

        Each tensor owns its storage. Ranks gather weights in `dtype`, except those that an adapter changes: they are
        merged in master precision.
        """
        if adapter_only:
            adapter = self._require_adapter()
            return adapter.file_tensors(self.weights), adapter.file_config()
        wide = wide_weights(self.model)
        adapted = self.adapter.adapted if self.adapter is not None else frozenset()

        def cast(name: str, tensor: Tensor) -> Tensor:
            return tensor if dtype is None else in_dtype(name, tensor, dtype, wide)

        weights = self.weights.whole(lambda name, part: part if name in adapted else cast(name, part))
        if self.adapter is not None:
            weights = self.adapter.merged(plain_weights(self.model, weights), self.weights)
        return ((name, cast(name, tensor)) for name, tensor in weights), None

    def _require_adapter(self) -> Adapter:
        if self.adapter is None:
            key = self.spec.engine.key_of("lora")
            raise ValueError(f"this engine trains all weights: it has no adapter ({key} is not set)")
        return self.adapter

    def adapter_config(self) -> dict[str, Any] | None:
        return None if self.adapter is None else self.adapter.file_config()

    def disable_adapter(self) -> AbstractContextManager[None]:
        return self._require_adapter().disabled()

    def memory_needs(self) -> MemoryNeeds:
        return self.update.memory_needs(self.weights) if self.trained else MemoryNeeds()

    @abstractmethod
    def to(self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True) -> None: ...

    @torch.no_grad()
    def blend(self, tensors: Mapping[str, Tensor], mixup: float) -> None:
        unknown = sorted(tensors.keys() - self.model.state_dict().keys())
        if unknown:
            raise ValueError(f"the model has no weight {unknown[0]}, which is to be blended into it")
        parts = [part for part in self._saved() if part[0] in tensors]  # without the other names of tied weights
        blend_parts(parts, tensors, mixup)
        self.weights.publish(frozenset(name for name, _, _ in parts))

    def _saved(self) -> list[Part]:
        """The parts of the model in a checkpoint: each weight that is not frozen, once, and persistent buffers."""
        if self.adapter is not None:
            kept = self.adapter.names | {name for name, _, _ in self.weights.trained()}
            return [part for part in self.weights.parts() if part[0] in kept]
        parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        buffers = [(name, one) for name, one in self.model.state_dict().items() if name not in parameters]
        first = self.ranks.rank == 0
        return [*self.weights.parts(), *((name, one, Whole(tuple(one.shape), first)) for name, one in buffers)]

    def save_checkpoint(self, folder: Path, wait: bool = True) -> None:
        self._checkpoint.save(folder, self._saved())
        if wait:
            self.checkpoint_written(wait=True)

    def checkpoint_written(self, wait: bool = False) -> bool:
        return self._checkpoint.written(wait)

    def load_checkpoint(self, folder: Path) -> None:
        """Raises CheckpointError naming the file: missing, damaged, or of another model, optimizer or chosen dtype."""
        if self.spec.engine.compute_dtype == AUTO:
            require_dtype(folder, self.compute_dtype, self.spec.engine.key_of("compute_dtype"))
        self._checkpoint.load(folder, self._saved())

    def export_hf(self, folder: Path) -> None:
        """Weights in compute_dtype, an adapter merged in; config and tokenizer."""
        weights, _ = self.get_per_tensor_param(dtype=self.compute)
        export_weights(self.model, weights, folder, writes=self.ranks.rank == 0)
        self._save_language(folder)

    def export_adapter(self, folder: Path) -> None:
        tensors, config = self.get_per_tensor_param(adapter_only=True)
        head = self.weights.chosen(frozenset({SCORE}))
        write_adapter(folder, config or {}, tensors, head, writes=self.ranks.rank == 0)
        self._save_language(folder)

    def _save_language(self, folder: Path) -> None:
        if self.ranks.rank == 0:
            save_language(self.spec.model, folder)
        self.ranks.meet()


def _budget(batch: Batch, packing: tuple[int, int]) -> int:
    """Tokens of a micro-batch of this batch; `packing`: tokens that are packed, and the limit of a sequence.

    The largest group fits if the limit allows, because its sequences share their prompt where they are together.
    """
    lengths = batch.lengths.tolist()
    largest = max((sum(lengths[i] for i in rows) for rows in groups_of(batch)), default=0)
    return min(max(packing[0], largest), packing[1])


def _cut_for_training(
    batch: Batch, packing: tuple[int, int], loss: LossFn, splits: bool
) -> tuple[list[list[int]], list[list[int]] | None]:
    """Cut a training batch into index lists within the token budget; without those that have no loss.

    With `splits`, sequences whose advantages are all 0 are cut apart, into the second list: they have no gradient. One
    stays in the first if there is no other, because a step with a gradient of 0 still moves the optimizer's moments.
    Raises ValueError for a sequence that is too long, and for a batch without loss weights.
    """
    if batch.loss_weights is None:
        raise ValueError("batch.loss_weights is not set: the loss has no denominator (see aggregation)")
    budget, whole = _budget(batch, packing), getattr(loss, "whole_groups", False)
    trained = _sequences_with(batch.loss_mask, batch)
    moving = _sequences_with(batch.loss_mask & (batch.advantages != 0), batch) if splits else trained
    if moving == trained:
        cut = cut_batch(batch, budget, whole)
        return [indices for indices in cut if not trained.isdisjoint(indices)], [] if splits else None
    moving = moving or {min(trained)}
    parts = sorted(moving), sorted(trained - moving)
    cuts = [cut_batch(select(batch, part), budget, whole) for part in parts]
    with_backward, without = ([[part[i] for i in one] for one in cut] for part, cut in zip(parts, cuts, strict=True))
    return with_backward, without


def _sequences_with(tokens: Tensor, batch: Batch) -> set[int]:
    """The numbers of the sequences that have one of these tokens, [T] bool."""
    before = torch.nn.functional.pad(tokens.cumsum(0), (1, 0))[batch.cu_seqlens]
    return set((before[1:] > before[:-1]).nonzero().flatten().tolist())


class ScoredStep:
    """The loss of each micro-batch of one step, and the step's metrics."""

    def __init__(self, loss: LossFn, experts: Experts | None) -> None:
        self._loss = loss
        self._experts = experts
        self._rows: list[dict[str, Tensor]] = []
        self.needs: frozenset[Need] = getattr(loss, "needs", frozenset())
        """What the loss needs of the forward beyond log-probs or values."""
        self.splits = experts is None and getattr(loss, "zero_without_advantage", False)
        """True if sequences without advantage need no backward; experts count their tokens there."""
        if experts is not None:
            self.needs |= experts.needs

    def total(self, output: ModelOutput, part: Batch) -> Tensor:
        """The sum over a micro-batch of loss values times loss weights, to call backward on."""
        result = self._loss(output, part)
        penalty, shown = self._experts.penalty(output.extras) if self._experts is not None else (0.0, {})
        mask = part.loss_mask
        assert part.loss_weights is not None
        total = ((result.values + penalty) * part.loss_weights)[mask].sum()
        row = {"train/loss": _entry(total.detach(), mask, largest=False)}
        for name, values in {**result.metrics, **shown}.items():
            counted = result.counted.get(name, mask)
            row[name] = _entry(values.detach()[counted].sum(), counted, largest=False)
        for name, values in result.largest.items():
            row[name] = _entry(values.detach()[mask].max(), mask, largest=True)
        self._rows.append(row)
        return total

    def add_still(self, outputs: list[ModelOutput], batch: Batch, cut: list[list[int]], device: str) -> None:
        """Add to metrics the micro-batches that have no backward; a pipeline has their outputs on its last stage."""
        for output, indices in zip(outputs, cut, strict=False):
            self.total(output, on_device(select(batch, indices), device))

    def add(self, sums: Mapping[str, Tensor]) -> None:
        """Add to metrics the sums over tokens that another pipeline stage computed of the same micro-batches."""
        for name, value in sums.items() if self._rows else ():
            self._rows[0][name][0] += value

    def metrics(self) -> Metrics:
        """Means over the tokens with a loss, and `train/loss` as a sum: one transfer from the device for all."""
        if not self._rows:
            return {"train/loss": Metric.sum(0.0)}
        names = list(self._rows[0])
        table = torch.stack([torch.stack([row[name] for name in names]) for row in self._rows]).tolist()
        merged: list[Metrics] = []
        for entries in table:
            found = dict(zip(names, entries, strict=True))
            one = {
                name: Metric.max(total) if largest else Metric.mean(total / count, count)
                for name, (total, count, largest) in found.items()
                if count
            }
            merged.append(one | {"train/loss": Metric.sum(found["train/loss"][0])})
        return merge_metrics(*merged)


def _entry(value: Tensor, counted: Tensor, largest: bool) -> Tensor:
    """[3] float64: a sum or maximum, the number of tokens, and whether it is a maximum."""
    return torch.stack([value.double(), counted.sum().double(), torch.full_like(value, largest, dtype=torch.float64)])


def _joined(outputs: list[ModelOutput], cut: list[list[int]], batch: Batch) -> ModelOutput:
    """Join the outputs of micro-batches in the order of the batch, on its device; empty if there are none."""
    if not outputs:  # a rank without sequences
        return ModelOutput()

    def join(values: list[Tensor | None]) -> Tensor | None:
        found = [value for value in values if value is not None]
        return restore(found, cut, batch.cu_seqlens).to(batch.token_ids.device) if found else None

    extras = {name: join([output.extras[name] for output in outputs]) for name in outputs[0].extras}
    return ModelOutput(
        logprobs=join([output.logprobs for output in outputs]),
        entropy=join([output.entropy for output in outputs]),
        values=join([output.values for output in outputs]),
        extras={name: value for name, value in extras.items() if value is not None},
    )


def on_device(batch: Batch, device: str) -> Batch:
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


def zero_of(output: ModelOutput) -> Tensor:
    """Zero, with a gradient of zero for every weight that made the output."""
    score = output.logprobs if output.logprobs is not None else output.values
    assert score is not None
    return (score * 0).sum()


def idle_batch(token_ranks: int) -> Batch:
    """A micro-batch for a rank that has none left: one sequence with a token for each rank that shares its tokens."""
    length = max(2, token_ranks)
    mask = torch.ones(length, dtype=torch.bool)
    mask[0] = False
    return Batch(
        token_ids=torch.zeros(length, dtype=torch.int64),
        position_ids=torch.arange(length),
        loss_mask=mask,
        cu_seqlens=torch.tensor([0, length]),
        group_index=torch.zeros(1, dtype=torch.int64),
        episode_index=torch.zeros(1, dtype=torch.int64),
    )
