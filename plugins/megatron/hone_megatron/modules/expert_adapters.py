"""LoRA on the experts of one rank: of each weight of experts one A and one B, as PEFT has them.

    y_e += scale * B_e A_e x_e         A_e [rank, in] and B_e [out, rank] of each expert e

    PEFT       A [experts * rank, in], expert by expert      B [out, rank * experts], column k * experts + e is B_e's k
    here       A [experts here * rank, in]                   B [rank * out, experts here]: a box of PEFT's B for each k

Ranks that share experts (`expert_tensor`) cut B of gate and up by rows, and A of down by columns, as they cut the
weights. They all hold the other two: each rank computes a part of their gradient, which is the sum over these ranks.
Parts of results need no exchange, because Megatron's dispatcher adds them up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hone.engines.lora.peft_layers import TRAINED, Layer
from hone.platforms.base import current_platform
from hone_megatron.mesh import MegatronRanks
from hone_megatron.modules.experts import empty, product_for
from hone_megatron.names import Box


class ExpertAdapter(nn.Module):
    """The adapters of this rank's experts, or of its share of them, for one weight."""

    def __init__(
        self, layer: Layer, prefix: str, boxes: Sequence[Box], rank: int, config: Any, ranks: MegatronRanks
    ) -> None:
        """`boxes`: the parts of the weight that this rank holds. `prefix`: how the layer's names in files begin."""
        super().__init__()
        self._layer, self._rank = layer, rank
        self._names = [prefix + layer.tensor(TRAINED, part) for part in ("lora_A", "lora_B")]
        self._all, *whole = boxes[0].whole
        self._first = boxes[0].offset[0]
        self._here = len({box.offset[0] for box in boxes})
        into, out = (1, 2) if layer.shape.turned else (2, 1)
        self._into, self._out = whole[into - 1], whole[out - 1]
        self._column, columns = boxes[0].offset[into], boxes[0].shape[into]
        self._rows = [(box.offset[out], box.shape[out]) for box in boxes if box.offset[0] == self._first]
        self._height = sum(height for _, height in self._rows)
        self._is_first = ranks.expert_tensor_rank == 0
        self._cuts_columns, self._cuts_rows = columns < self._into, self._height < self._out
        self._sharing = ranks.expert_tensor_group if ranks.sizes.expert_tensor > 1 else None
        self._product = product_for(config.params_dtype, (rank, columns, self._height), current_platform())
        self.lora_A = empty(config, self._here * rank, columns)
        self.lora_B = empty(config, rank * self._height, self._here)

    def forward(self, out: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:
        """Add the adapters' results for `tokens` [t, in] to `out` [t, out], the results of the experts' weights."""
        if self._layer.module.disable_adapters:
            return out
        a = self.lora_A if self._cuts_columns else self._whole(self.lora_A)
        b = self.lora_B if self._cuts_rows else self._whole(self.lora_B)
        inner = self._product(tokens, a.view(self._here, self._rank, -1).transpose(1, 2), counts)
        of_each = b.view(self._rank, self._height, self._here).permute(2, 0, 1).contiguous()  # [experts, rank, out]
        scale: float = self._layer.module.scaling[TRAINED]
        return out + self._product(inner, of_each, counts) * scale

    def _whole(self, weight: Tensor) -> Tensor:
        """A weight that all ranks which share the experts hold."""
        return weight if self._sharing is None else _Held.apply(weight, self._sharing)  # type: ignore[no-untyped-call]

    def boxes(self) -> dict[nn.Parameter, list[Box]]:
        """The boxes of A and B within PEFT's."""
        (a, b), rank = self._names, self._rank
        owns_a, owns_b = self._is_first or self._cuts_columns, self._is_first or self._cuts_rows
        shape = tuple(self.lora_A.shape)
        of_b, at = [], 0
        for k in range(rank):
            for row, height in self._rows:
                offset = (row, k * self._all + self._first)
                whole, rows = (self._out, rank * self._all), (at, at + height)
                of_b.append(Box(b, whole, offset, (height, self._here), rows, owns_b))
                at += height
        of_a = Box(a, (self._all * rank, self._into), (self._first * rank, self._column), shape, (0, shape[0]), owns_a)
        return {self.lora_A: [of_a], self.lora_B: of_b}


class _Held(torch.autograd.Function):
    """A weight that several ranks hold and use for parts of a sum: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None
