"""LoRA in Megatron's fused matrices: each Hugging Face layer keeps an A and a B of its own, as PEFT has them.

    column-parallel (qkv; gate and up)     a_i = A_i x      on every tensor rank      y[rows_i] += scale * B_i a_i
    row-parallel (o_proj, down_proj)       a = sum over tensor ranks of A x           y += scale * B a
    whole on every tensor rank             a = A x                                    y += scale * B a

Tensor ranks exchange `a`, which is as wide as the rank, and cut B by rows or A by columns, as the matrix itself is cut.
PEFT's layers are attached to the transformers model without weights: they say which layers are adapted, with which
names, scales and first values, so names and values are the same in all engines. Adapters of experts are
in `modules/expert_adapters`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from hone.engines.lora.adapter import Adapter
from hone.engines.lora.adapter_files import AdapterError
from hone.engines.lora.peft_layers import TRAINED, Layer
from hone.engines.rebuilt.reading import LoadedWeights, Reader, Region
from hone.engines.settings import LoraConfig
from hone.models.loading import ValueModel
from hone.models.numerics.precision import plain_name
from hone.models.value_head import SCORE
from hone_megatron.families import ModelShape
from hone_megatron.mesh import MegatronRanks
from hone_megatron.modules.expert_adapters import ExpertAdapter
from hone_megatron.modules.experts import ExpertMatrices
from hone_megatron.names import Box

MATRICES = (ColumnParallelLinear, RowParallelLinear, nn.Linear)
Table = dict[nn.Parameter, list[Box]]


@dataclass(frozen=True, slots=True)
class Target:
    """One Hugging Face layer within a Megatron matrix."""

    layer: Layer
    prefix: str  # of the layer's names in the state dict
    boxes: Sequence[Box]  # of its weight, in the order of the matrix's rows

    def name(self, part: str) -> str:
        return self.prefix + self.layer.tensor(TRAINED, part)


class AdaptedLinear(nn.Module):
    """A matrix of the model with the adapters of the Hugging Face layers in it."""

    def __init__(self, base: Any, targets: Sequence[Target], rank: int, config: ModelShape) -> None:
        super().__init__()
        self.base_layer = base
        self._cuts_rows = isinstance(base, ColumnParallelLinear)
        self._cuts_columns = isinstance(base, RowParallelLinear)
        self._sequence = config.sequence_parallel
        self._layers = [target.layer.module for target in targets]
        self._targets = targets
        self._rank = rank
        columns = base.weight.shape[1]
        heights = [sum(box.shape[0] for box in target.boxes) for target in targets]
        made: Any = {"dtype": config.params_dtype, "device": base.weight.device}
        self.lora_A = nn.ParameterList(torch.empty(rank, columns, **made) for _ in targets)
        self.lora_B = nn.ParameterList(torch.empty(height, rank, **made) for height in heights)
        whole = [*(() if self._cuts_columns else self.lora_A), *(() if self._cuts_rows else self.lora_B)]
        for weight in whole:  # with sequence parallelism, it sees this rank's tokens: its gradient is a sum
            weight.sequence_parallel = self._sequence
        spans = [torch.arange(*box.rows) for target in targets for box in target.boxes]
        self._rows = torch.cat(spans).to(base.weight.device)

    def forward(self, x: Tensor, *arguments: Any, **named: Any) -> Any:
        """[T, 1, in] -> [T, 1, out] of this rank; of Megatron's matrices, also the bias if the caller adds it."""
        result = self.base_layer(x, *arguments, **named)
        if self._layers[0].disable_adapters:
            return result
        if isinstance(result, tuple):
            return self._adapted(x, result[0]), result[1]
        return self._adapted(x, result)

    def _adapted(self, x: Tensor, out: Tensor) -> Tensor:
        inner = self._shared(F.linear(x, torch.cat(list(self.lora_A))))
        parts = [
            F.linear(one, weight) * layer.scaling[TRAINED]
            for one, weight, layer in zip(inner.split(self._rank, -1), self.lora_B, self._layers, strict=True)
        ]
        return out.index_add(-1, self._rows, torch.cat(parts, -1))

    def _shared(self, inner: Tensor) -> Tensor:
        """Exchange A x between tensor ranks so that each can multiply it with its B."""
        exchange: Any = None
        if self._cuts_rows:
            exchange = gather_from_sequence_parallel_region if self._sequence else copy_to_tensor_model_parallel_region
        elif self._cuts_columns and self._sequence:
            exchange = reduce_scatter_to_sequence_parallel_region
        elif self._cuts_columns:
            exchange = reduce_from_tensor_model_parallel_region
        shared: Tensor = inner if exchange is None else exchange(inner)
        return shared

    def boxes(self, is_first: bool) -> Table:
        """The boxes of A and B; `is_first` says whether this is the first tensor rank, which owns what all hold."""
        table: Table = {}
        for target, a, b in zip(self._targets, self.lora_A, self.lora_B, strict=True):
            out, into = target.boxes[0].whole
            first, at = target.boxes[0].offset[1], 0
            owns_a, owns_b = is_first or self._cuts_columns, is_first or self._cuts_rows
            table[a] = [
                Box(target.name("lora_A"), (self._rank, into), (0, first), tuple(a.shape), (0, self._rank), owns_a)
            ]
            table[b] = []
            for box in target.boxes:
                height = box.shape[0]
                table[b].append(
                    Box(
                        target.name("lora_B"),
                        (out, self._rank),
                        (box.offset[0], 0),
                        (height, self._rank),
                        (at, at + height),
                        owns_b,
                    )
                )
                at += height
        return table


class AdaptedModel:
    """The adapter of one engine: PEFT's layers on the model without weights, and its matrices in Megatron's modules."""

    def __init__(self, adapter: Adapter, config: LoraConfig, skeleton: Any, name: str) -> None:
        """Attach the adapter to `skeleton`, the transformers model on the meta device.

        Raises AdapterError, which calls the model `name`, for an adapter that Megatron's modules cannot carry.
        """
        self._skeleton = skeleton
        self._name = name
        self._adapter = adapter
        self._key = config.key_of("path" if config.path else "targets")
        is_value_model = isinstance(skeleton, ValueModel)
        self._prefix = "body." if is_value_model else ""
        adapter.layers.attach(skeleton.body if is_value_model else skeleton, name)
        if adapter.layers.peft.use_dora:
            raise AdapterError(_refusal(config.key_of("path"), "adapters with DoRA", "dora"))
        if adapter.layers.whole:
            raise AdapterError(_refusal(config.key_of("path"), "adapters with modules_to_save", "modules_to_save"))
        self._layers = {self._prefix + plain_name(layer.weight): layer for layer in adapter.layers.found}
        self._names = {plain_name(name): name for name, _ in skeleton.named_parameters(remove_duplicate=False)}

    def fill(self, reader: Reader) -> Reader:
        """Give the adapter its first values, in host memory; return a reader of them and of the base's weights."""
        if isinstance(self._skeleton, ValueModel):  # the adapter's folder may bring a head
            score: Any = self._skeleton.score
            shape = tuple(score.weight.shape)
            score.weight = nn.Parameter(reader.read(Region(SCORE, shape, (0, 0), shape)))
        self._adapter.fill(self._skeleton, self._prefix, "cpu", _not_read, _held)
        here = {name: one for name, one in self._skeleton.named_parameters() if not one.is_meta}
        return _Reader(LoadedWeights(self._skeleton), frozenset(here), reader)

    def release(self) -> None:
        """Free the first values, which the engine has read."""
        for module in self._skeleton.modules():
            for name, weight in module._parameters.items():
                if weight is not None and not weight.is_meta:
                    module._parameters[name] = nn.Parameter(weight.to("meta"), weight.requires_grad)

    def insert(self, part: Any, table: Mapping[nn.Parameter, list[Box]], ranks: MegatronRanks) -> Table:
        """Freeze a part of the model and put the adapter's matrices into it.

        `table` has the boxes of its parameters; returns the boxes of the adapted part. Raises AdapterError for an
        adapted layer that is in none of `MATRICES` and no weight of experts.
        """
        for name, parameter in part.named_parameters():
            parameter.requires_grad_(name == SCORE)
        found = {
            parameter: [replace(box, name=self._names[box.name]) for box in boxes] for parameter, boxes in table.items()
        }
        left = {target.layer.path for boxes in table.values() for target in self._within(boxes)}
        for path, module in list(part.named_modules()):
            weights = {name: self._within(table.get(one, ())) for name, one in module.named_parameters(recurse=False)}
            if isinstance(module, ExpertMatrices):
                found |= self._adapt_experts(module, weights, ranks)
            elif weights.get("weight") and type(module) in MATRICES:
                adapted = AdaptedLinear(module, weights["weight"], self._adapter.layers.peft.r, part.config)
                part.set_submodule(path, adapted)
                found |= adapted.boxes(ranks.tensor_rank == 0)
            else:
                continue
            left -= {target.layer.path for targets in weights.values() for target in targets}
        if left:
            raise AdapterError(
                f"{self._key}: {min(left)} of {self._name} is no linear layer in the megatron engine; train an adapter "
                "without it (`exclude`), or use backend fsdp2"
            )
        return found

    def _adapt_experts(
        self, experts: ExpertMatrices, weights: Mapping[str, Sequence[Target]], ranks: MegatronRanks
    ) -> Table:
        """Put adapters on the `weights` of experts, by name of the parameter; return their boxes."""
        found: Table = {}
        for name, targets in weights.items():
            for target in targets:  # at most one: a parameter has one weight of all experts
                adapter = ExpertAdapter(
                    target.layer, target.prefix, target.boxes, self._adapter.layers.peft.r, experts.config, ranks
                )
                experts.adapters[name] = adapter.to(getattr(experts, name).device)
                found |= adapter.boxes()
        return found

    def _within(self, boxes: Sequence[Box]) -> list[Target]:
        """The adapted layers in a matrix."""
        of_weight: dict[str, list[Box]] = {}
        for box in boxes:
            of_weight.setdefault(box.name, []).append(box)
        return [Target(self._layers[name], self._prefix, of_weight[name]) for name in of_weight if name in self._layers]


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads what the model holds in memory from there, and the rest from `others` under its plain name."""

    memory: Reader
    here: frozenset[str]
    others: Reader

    def read(self, region: Region) -> Tensor:
        if region.name in self.here:
            return self.memory.read(region)
        return self.others.read(replace(region, name=plain_name(region.name)))


WHY_NOT = {
    "dora": "DoRA needs the norms of whole rows of every layer, and tensor ranks hold parts of fused matrices",
    "dropout": "layers in one fused matrix share its input, and PEFT drops it for each of them separately",
    "modules_to_save": "modules that are trained whole need a frozen copy beside them, and Megatron's have one weight",
    "quantise": "Megatron-Core's matrices have no 4-bit form",
    "init": "it takes a part out of the weights and keeps it as a second adapter, and Megatron's matrices have one",
}


def require_lora(config: LoraConfig) -> None:
    """Raise ValueError with the key and the reason for settings that the engine does not have."""
    asked = {
        "dora": config.dora,
        "dropout": config.dropout > 0,
        "modules_to_save": bool(config.modules_to_save),
        "quantise": config.quantise is not None,
        "init": config.init in ("pissa", "olora"),
    }
    for name, is_asked in asked.items():
        if is_asked:
            value = getattr(config, name)
            said = "" if name == "quantise" else f"={','.join(value) if isinstance(value, tuple) else value}"
            raise ValueError(_refusal(f"{config.key_of(name)}{said}", "it", name))


def _refusal(key: str, what: str, reason: str) -> str:
    return f"{key}: backend megatron does not have {what}: {WHY_NOT[reason]}; change it, or use backend fsdp2"


def _not_read(name: str, weight: Tensor) -> Tensor:
    raise AssertionError(f"first values read {name}: initialisations that need weights are refused")


def _held(empty: Any, value: Tensor, trained: bool) -> nn.Parameter:
    return nn.Parameter(value.clone(), requires_grad=trained)
