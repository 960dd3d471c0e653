"""The `megatron` engine: one model over tensor, context and data-parallel ranks, in Megatron-Core's modules."""

from __future__ import annotations

import hone.engines.megatron.quiet_import  # noqa: F401  isort: skip

from collections.abc import Callable
from dataclasses import replace
from functools import cache
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
from hone.engines.base import EngineSpec
from hone.engines.engine import Engine, ScoredStep, idle_batch, on_device, zero_of
from hone.engines.forward import Forward, Scorer, States, head_of_reference, value_output
from hone.engines.logprobs import Head
from hone.engines.megatron.cpu_patches import patch_for_cpu
from hone.engines.megatron.families import ModelShape, model_shape
from hone.engines.megatron.mesh import MegatronRanks, open_mesh
from hone.engines.megatron.model import Model, build_part, recompute_layers
from hone.engines.megatron.names import Box, Names
from hone.engines.megatron.pipeline import Pipeline
from hone.engines.megatron.reading import LoadedWeights, Reader, StoredWeights
from hone.engines.megatron.rows import Row, Rows
from hone.engines.megatron.settings import MegatronParallel, MegatronSettings
from hone.engines.megatron.weights import MegatronWeights
from hone.models.attention.sequence_parallel import shared_by
from hone.models.loading import DTYPES, ValueModel, empty_model, folder_of, load_language_model, load_value_model
from hone.models.value_head import values_of
from hone.platforms.base import compute_dtype, current_platform
from hone.types import Batch, ModelOutput


class MegatronEngine(Engine):
    """Builds this rank's part of the model in Megatron-Core. `model` is the transformers model without weights."""

    weights: MegatronWeights
    ranks: MegatronRanks
    cuts_weights = True

    def __init__(self, spec: EngineSpec, device: str) -> None:
        """Raises ValueError naming a setting that this engine does not have."""
        backend = spec.engine.backend
        assert isinstance(backend, MegatronSettings)
        self._parallel = backend.parallel or MegatronParallel()
        _require_supported(spec, self._parallel)
        if device == "cpu":
            patch_for_cpu()
        super().__init__(spec, device, open_mesh(self._parallel, device))
        if device != "cpu":
            model_parallel_cuda_manual_seed(0)

    # ------------------------------------------------------------------------------------------------------- building

    def _build(self) -> Forward:
        spec = self.spec
        name = spec.model.path or "the model of model.build"
        reader = self._open()
        body: Any = self.model.body if isinstance(self.model, ValueModel) else self.model.base_model
        config = body.config
        shape = model_shape(config, name, self.ranks, self._parallel, self.compute, self.device)
        sizes = self.ranks.sizes
        longest = -(-spec.engine.max_tokens_per_microbatch // self.ranks.token_ranks) * self.ranks.token_ranks
        self._rows = Rows(body, self.ranks, name, self.device, longest if sizes.virtual > 1 else None)
        stages = range(sizes.virtual) if sizes.virtual > 1 else (None,)
        self._parts = [
            build_part(shape, self.ranks, config, stage, self.model_type == "value_model").to(self.device)
            for stage in stages
        ]
        table: dict[nn.Parameter, list[Box]] = {}
        for part in self._parts:
            if spec.engine.activation_checkpointing and self.trained:
                recompute_layers(part)
            names = Names(config, self.ranks, self._prefix, part.first_layer, part.copies_embedding)
            table |= {parameter: names.boxes(key, parameter) for key, parameter in part.named_parameters()}
        wrapped = [self._wrapped(part, shape) for part in self._parts]
        self._pipeline = Pipeline(wrapped, self._rows, longest) if sizes.pipeline > 1 else None
        keeps_masters = self.trained or spec.follows
        dtype = DTYPES[spec.model.dtype] if keeps_masters else self.compute
        self.weights = MegatronWeights(wrapped, table, self.model, self.ranks, dtype)
        self.weights.read(reader)
        head = None
        if spec.reference is not None:
            head = self._share_of(head_of_reference(spec.reference, self.compute_dtype, self.device, self._head_dtype))
        self._score = Scorer(spec.temperature, spec.engine.logprob_chunk_tokens, head)
        return self._forward

    @property
    def _prefix(self) -> str:
        """What the names of the body's weights begin with."""
        return "body." if self.model_type == "value_model" else "model."

    def _open(self) -> Reader:
        """Set `model`, and open what its weights are read from."""
        model, is_value_model = self.spec.model, self.model_type == "value_model"
        if model.build is None:
            self.model = empty_model(model, is_value_model)
            return StoredWeights(folder_of(model), self._prefix, model)
        loaded: Any = load_value_model(model) if is_value_model else load_language_model(model)
        reader = LoadedWeights(loaded)
        self.model = loaded.to("meta")
        if not is_value_model:
            loaded.tie_weights()
        return reader

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
        wrapped: nn.Module = DistributedDataParallel(shape, config, part)
        return wrapped

    def _share_of(self, load: Callable[[], Head]) -> Callable[[], Head]:
        """Of a whole head, the rows of this tensor rank."""

        @cache
        def share() -> Head:
            head = load()
            rows = self.ranks.rows_of_vocabulary(len(head.weight))
            bias = None if head.bias is None else head.bias[rows].clone()
            return replace(head, weight=head.weight[rows].clone(), bias=bias)

        return share

    # ------------------------------------------------------------------------------------------------------ computing

    def _forward(self, batch: Batch, needs: frozenset[str]) -> ModelOutput:
        row = self._rows.lay(batch)
        return self._output(self._parts[0](row.token_ids, row.angles, row.packed), row, batch, needs)

    def _train(self, batch: Batch, cut: list[list[int]], step: ScoredStep) -> None:
        if self._pipeline is None:
            super()._train(batch, cut, step)
            return

        def loss(hidden: Tensor, row: Row, part: Batch) -> Tensor:
            output = self._output(hidden, row, part, step.needs)
            return zero_of(output) if part is idle else step.total(output, part)

        micro_batches, idle = self._micro_batches(batch, cut)
        self._pipeline.run(micro_batches, loss, backward=True)

    @torch.no_grad()
    def _infer(self, batch: Batch, cut: list[list[int]], needs: frozenset[str]) -> list[ModelOutput]:
        if self._pipeline is None:
            return super()._infer(batch, cut, needs)

        def output(hidden: Tensor, row: Row, part: Batch) -> ModelOutput:
            return self._output(hidden, row, part, needs)

        micro_batches, _ = self._micro_batches(batch, cut)
        return self._pipeline.run(micro_batches, output, backward=False)[: len(cut)]

    def _micro_batches(self, batch: Batch, cut: list[list[int]]) -> tuple[list[Batch], Batch]:
        """As many micro-batches as any rank has, and the idle one that fills them up."""
        sizes = self.ranks.sizes
        idle = on_device(idle_batch(self.ranks.token_ranks), self.device)
        count = len(cut) + self._missing(cut)
        if sizes.virtual > 1:  # the interleaved schedule takes as many micro-batches as stages at a time
            count = -(-count // sizes.pipeline) * sizes.pipeline
        parts = [on_device(select(batch, indices), self.device) for indices in cut]
        return [*parts, *[idle] * (count - len(cut))], idle

    def _output(self, hidden: Tensor, row: Row, batch: Batch, needs: frozenset[str]) -> ModelOutput:
        """From the last hidden states [T, 1, H] of this rank to the outputs of the micro-batch, on every rank."""
        is_value_model = self.model_type == "value_model"
        if self.ranks.sizes.sequence:  # each tensor rank computes a part of the gradient, or all of it the same
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=not is_value_model)
        elif not is_value_model:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        found = States(row.rows, hidden[:, 0].index_select(0, row.where), {})
        with shared_by(self.ranks.context):
            if is_value_model:
                return value_output(found, values_of(self._parts[-1].score.weight, found.hidden), batch)
            return self._score(found, self._head, batch, needs)

    @property
    def _head(self) -> Head:
        """This rank's rows of the head, without padding."""
        config: Any = self.model.config
        tokens: int = config.vocab_size
        rows = self.ranks.rows_of_vocabulary(tokens)
        weight = self._parts[-1].head_weight()[: rows.stop - rows.start]
        return Head(weight, dtype=self._head_dtype, vocabulary=self.ranks.vocabulary(tokens))

    def to(self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Everything stays on the engine's device: Megatron's buffers do not move."""
        if device != self.device:
            raise ValueError(f"the megatron engine keeps its model on {self.device} and cannot move it to {device}")


def _require_supported(spec: EngineSpec, parallel: MegatronParallel) -> None:
    """Raise ValueError naming a setting that this engine does not have."""
    engine, used = spec.engine, spec.model.used
    asked = {
        engine.key_of("lora"): engine.lora is not None,
        engine.key_of("moe"): engine.moe is not None,
        f"{engine.key_of('activation_checkpointing')}=offload": engine.activation_checkpointing == "offload",
        used.key_of("dropout"): used.dropout != 0,
        used.key_of("vision"): used.vision is not None,
    }
    for key, is_asked in asked.items():
        if is_asked:
            raise ValueError(f"backend megatron does not have {key}; remove it, or use backend fsdp2")
    compute = compute_dtype(engine.compute_dtype, current_platform())
    if spec.model.dtype != compute and (spec.model.dtype, compute) != ("float32", "bfloat16"):
        raise ValueError(
            f"backend megatron: compute_dtype={compute} needs model.dtype={compute}, or float32 with bfloat16; found "
            f"{spec.model.dtype}"
        )
