"""The `megatron` engine: one model over tensor, context and data-parallel ranks, in Megatron-Core's modules."""

from __future__ import annotations

import hone_megatron.quiet_import  # noqa: F401  isort: skip

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    model_parallel_cuda_manual_seed,
)
from torch import Tensor, nn

from hone.data.packing import select
from hone.engines.base import EngineSpec, MemoryNeeds
from hone.engines.engine import ScoredStep, idle_batch, on_device, zero_of
from hone.engines.forward import Forward, Scorer, States, value_output
from hone.engines.logprobs import Head
from hone.engines.memory import OffloadingEngine
from hone.engines.rebuilt.reading import body_prefix, open_model
from hone.engines.reference_head import head_of_reference
from hone.engines.unsupported import refuse
from hone.models.attention.sequence_parallel import shared_by
from hone.models.loading import DTYPES
from hone.models.routing import ROUTES
from hone.models.value_head import values_of
from hone.platforms.base import compute_dtype, current_platform
from hone.types import Batch, ModelOutput, Need
from hone_megatron.adapters import AdaptedModel, require_lora
from hone_megatron.cpu_patches import patch_for_cpu
from hone_megatron.families import ModelShape, model_shape
from hone_megatron.mesh import MegatronRanks, open_mesh
from hone_megatron.model import Model, build_part
from hone_megatron.modules.thd import choose_attention
from hone_megatron.moving import keep_hooks
from hone_megatron.names import Box, Names
from hone_megatron.patches import patch
from hone_megatron.pipeline import Pipeline
from hone_megatron.recompute import recompute_layers, recompute_modules, require_modules
from hone_megatron.routed import RoutedParts, share_corrections
from hone_megatron.rows import Row, Rows
from hone_megatron.settings import MegatronParallel, MegatronSettings
from hone_megatron.weights import MegatronWeights, read_buffers

CHANGED = frozenset({"model", "optimizer"})  # what is on the device when weights change: ranks share them out there


class MegatronEngine(OffloadingEngine):
    """Builds this rank's part of the model in Megatron-Core. `model` is the transformers model without weights."""

    weights: MegatronWeights
    ranks: MegatronRanks
    cuts_weights = True
    recomputes_parts = True

    def __init__(self, spec: EngineSpec, device: str) -> None:
        """Raises ValueError naming a setting that this engine does not have."""
        backend = spec.engine.backend
        assert isinstance(backend, MegatronSettings)
        self._backend = backend
        self._parallel = backend.parallel or MegatronParallel()
        _require_supported(spec)
        patch()
        if device == "cpu":
            patch_for_cpu()
        ranks = open_mesh(self._parallel, device, backend.key_of("parallel"), self)
        super().__init__(spec, device, ranks, backend.offload)
        if device != "cpu":
            model_parallel_cuda_manual_seed(0)

    # ------------------------------------------------------------------------------------------------------- building

    def _build(self) -> Forward:
        spec = self.spec
        name = spec.model.path or "the model of model.build"
        is_value_model = self.model_type == "value_model"
        self.model, reader = open_model(spec.model, is_value_model)
        adapted = self._adapt(name)
        body: Any = self.model.body if is_value_model else self.model.base_model
        config = body.config
        shape = model_shape(config, name, self.ranks, self._parallel, self.compute, self.device)
        sizes = self.ranks.sizes
        longest = -(-spec.engine.token_limit // self.ranks.token_ranks) * self.ranks.token_ranks
        attention = choose_attention(shape, current_platform())
        length = longest if sizes.virtual > 1 else None
        self._rows = Rows(body, self.ranks, name, self.device, length, attention.lay)
        stages = range(sizes.virtual) if sizes.virtual > 1 else (None,)
        build = functools.partial(build_part, shape, self.ranks, config, attention.module, is_value_model)
        self._parts = [build(stage).to(self.device) for stage in stages]
        table: dict[nn.Parameter, list[Box]] = {}
        for part in self._parts:
            self._recompute(part, name)
            names = Names(config, self.ranks, body_prefix(is_value_model), part.first_layer, part.copies_embedding)
            boxes = {parameter: names.boxes(key, parameter) for key, parameter in part.named_parameters()}
            table |= boxes if adapted is None else adapted.insert(part, boxes, self.ranks)
        wrapped = [self._wrapped(part, shape) for part in self._parts]
        self._pipeline = Pipeline(wrapped, self._rows, longest) if sizes.pipeline > 1 else None
        keeps_masters = self.trained or spec.follows
        dtype = DTYPES[spec.model.dtype] if keeps_masters else self.compute
        share_corrections(
            self._parts, read_buffers(self.model, reader, dtype, self.device), body_prefix(is_value_model)
        )
        self.weights = MegatronWeights(wrapped, table, self.model, self.ranks, dtype)
        if adapted is None:
            self.weights.read(reader)
        else:
            self.weights.read(adapted.fill(reader))
            adapted.release()
        moe = spec.engine.moe if self.trained else None  # a model that only infers keeps its own routes
        self._routed = RoutedParts(self._parts, self.ranks, moe, name)
        self.experts = self._routed.experts
        head = None
        if spec.reference is not None:
            whole = head_of_reference(spec.reference, self.compute_dtype, self.device, self._head_dtype)
            head = self.ranks.vocabulary.own(whole)
        self._score = Scorer(spec.temperature, spec.engine.logprob_chunk_tokens, head)
        return self._forward

    def _recompute(self, part: Model, name: str) -> None:
        """Have the backward of a part of the model compute again what the settings name."""
        how = self.spec.engine.activation_checkpointing
        if how == "selective":
            modules = self._backend.recompute_modules or ("core_attn",)
            require_modules(modules, part.config, name, self._backend.key_of("recompute_modules"))
            if self.trained:
                recompute_modules(part, modules)
        elif how and self.trained:
            recompute_layers(part, in_cpu_memory=how == "offload")

    def _adapt(self, name: str) -> AdaptedModel | None:
        """Attach the adapter to the model without weights."""
        lora = self.spec.engine.lora
        return None if lora is None or self.adapter is None else AdaptedModel(self.adapter, lora, self.model, name)

    def _wrapped(self, part: Model, shape: ModelShape) -> nn.Module:
        """The part with Megatron's buffers, sharing out gradients and updates over data-parallel ranks (ZeRO-1)."""
        if not self.trained:
            whole: nn.Module = part.requires_grad_(False)
            return whole
        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=self.compute == torch.bfloat16,
            overlap_grad_reduce=False,
            use_distributed_optimizer=True,
            check_for_nan_in_grad=False,
        )
        wrapped: Any = DistributedDataParallel(shape, config, part)
        keep_hooks(wrapped)
        return wrapped  # type: ignore[no-any-return]

    # ------------------------------------------------------------------------------------------------------ computing

    def _forward(self, batch: Batch, needs: frozenset[Need]) -> ModelOutput:
        row = self._rows.lay(batch)
        return self._output(*self._routed.run(0, row, batch, needs), row, batch, needs)

    def _train(self, batch: Batch, cut: list[list[int]], step: ScoredStep) -> None:
        if self._pipeline is None:
            super()._train(batch, cut, step)
            return

        def forward(number: int, row: Row, part: Batch) -> tuple[Tensor, dict[str, Tensor]]:
            return self._routed.run_stage(number, row, part, frozenset() if part is idle else step.needs)

        def loss(hidden: Tensor, extras: dict[str, Tensor], row: Row, part: Batch) -> Tensor:
            if part is idle:
                return zero_of(self._output(hidden, extras, row, part, frozenset()))
            return step.total(self._output(hidden, extras, row, part, step.needs), part)

        micro_batches, idle = self._micro_batches(batch, cut)
        self._pipeline.run(micro_batches, forward, loss, backward=True)
        self.weights.collect()
        step.add(self._routed.stage_sums(self.device))

    @torch.no_grad()
    def _infer(self, batch: Batch, cut: list[list[int]], needs: frozenset[Need]) -> list[ModelOutput]:
        if self._pipeline is None:
            return super()._infer(batch, cut, needs)

        def forward(number: int, row: Row, part: Batch) -> tuple[Tensor, dict[str, Tensor]]:
            return self._routed.run_stage(number, row, part, frozenset() if part is idle else needs)

        def output(hidden: Tensor, extras: dict[str, Tensor], row: Row, part: Batch) -> ModelOutput:
            return self._output(hidden, extras, row, part, frozenset() if part is idle else needs)

        micro_batches, idle = self._micro_batches(batch, cut)
        if not micro_batches:  # of no rank: Megatron's schedules want one at least
            return []
        outputs = self._pipeline.run(micro_batches, forward, output, backward=False)[: len(cut)]
        return self._routed.joined(micro_batches[: len(cut)], outputs) if ROUTES in needs and cut else outputs

    def _micro_batches(self, batch: Batch, cut: list[list[int]]) -> tuple[list[Batch], Batch]:
        """As many micro-batches as any rank has, and the idle one that fills them up."""
        sizes = self.ranks.sizes
        idle = on_device(idle_batch(self.ranks.token_ranks), self.device)
        count = len(cut) + self._missing(cut)
        if sizes.virtual > 1:  # the interleaved schedule takes as many micro-batches as stages at a time
            count = -(-count // sizes.pipeline) * sizes.pipeline
        parts = [on_device(select(batch, indices), self.device) for indices in cut]
        return [*parts, *[idle] * (count - len(cut))], idle

    def _output(
        self, hidden: Tensor, extras: dict[str, Tensor], row: Row, batch: Batch, needs: frozenset[Need]
    ) -> ModelOutput:
        """From the last hidden states [T, 1, H] of this rank to the outputs of the micro-batch, on every rank."""
        is_value_model = self.model_type == "value_model"
        if self.ranks.sizes.sequence:  # each tensor rank computes a part of the gradient, or all of it the same
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=not is_value_model)
        elif not is_value_model:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        found = States(row.rows, hidden[:, 0].index_select(0, row.where), row.copies, extras)
        with shared_by(self.ranks.context):
            if is_value_model:
                return value_output(found, values_of(self._parts[-1].score.weight, found.hidden), batch)
            return self._score(found, self._head, batch, needs)

    @property
    def _head(self) -> Head:
        """This rank's rows of the head, without padding."""
        config: Any = self.model.config
        tokens: int = config.vocab_size
        rows = self.ranks.vocabulary.rows(tokens)
        weight = self._parts[-1].head_weight()[: rows.stop - rows.start]
        return Head(weight, dtype=self._head_dtype, vocabulary=self.ranks.vocabulary.vocabulary(tokens))

    def to(self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Raises ValueError for another device than the engine's and the CPU."""
        if device not in (self._home, "cpu"):
            raise ValueError(f"the megatron engine computes on {self._home} and moves to cpu only, not to {device}")
        if self._home != "cpu":
            self._move(device, model=model, optimizer=optimizer, grad=grad)

    def _move(self, device: str, *, model: bool, optimizer: bool, grad: bool) -> None:
        self.weights.move(device, model=model, optimizer=optimizer, grad=grad)
        if optimizer and self.trained:
            self.update.move(device)
        if device == "cpu":
            current_platform().empty_cache()  # otherwise the allocator keeps the memory from other processes

    def memory_needs(self) -> MemoryNeeds:
        needs = super().memory_needs()
        return MemoryNeeds(0, self.weights.nbytes + needs.kept + needs.training) if self.offloads else needs

    def load_checkpoint(self, folder: Path) -> None:
        with self._on_device(CHANGED):
            super().load_checkpoint(folder)

    def blend(self, tensors: Mapping[str, Tensor], mixup: float) -> None:
        with self._on_device(CHANGED):
            super().blend(tensors, mixup)


def _require_supported(spec: EngineSpec) -> None:
    """Raise ValueError naming a setting that this engine does not have."""
    engine, used = spec.engine, spec.model.used
    asked = {
        used.key_of("dropout"): used.dropout != 0,
        used.key_of("vision"): used.vision is not None,
    }
    refuse("megatron", asked)
    backend: Any = engine.backend
    if backend.recompute_modules is not None and engine.activation_checkpointing != "selective":
        raise ValueError(
            f"{backend.key_of('recompute_modules')} needs {engine.key_of('activation_checkpointing')}=selective, found "
            f"{engine.activation_checkpointing}; set it, or remove recompute_modules"
        )
    if engine.lora is not None:
        require_lora(engine.lora)
    compute = compute_dtype(spec.engine.compute_dtype, current_platform())
    if spec.model.dtype != compute and (spec.model.dtype, compute) != ("float32", "bfloat16"):
        raise ValueError(
            f"backend megatron: compute_dtype={compute} needs model.dtype={compute}, or float32 with bfloat16; found "
            f"{spec.model.dtype}"
        )
