"""The experts of a mixture on one rank: one parameter has a matrix of all of them, one under the other.

    gate_up_proj [experts * 2 inner, H]     of each expert: the rows of gate, then the rows of up
    down_proj    [experts * H, inner]

Megatron's own `SequentialMLP` has parameters for each expert, which a grouped product would copy together in every
forward; its grouped experts need Transformer Engine or the package grouped_gemm.

Of an expert that several ranks share (`expert_tensor`), each has some of the inner features: it computes a part of each
token's result, and Megatron's dispatcher, which brought the tokens of all these ranks here, adds the parts up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from hone.platforms.base import PlatformBase, current_platform

ALIGNMENT = 16  # bytes, of the rows of what torch's grouped product takes

ProductFn = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Tokens [t, in] in the order of the experts, a matrix for each [experts, in, out], and how many tokens each has.

Returns each token times its expert's matrix, [t, out].
"""


def one_by_one(tokens: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """A product for each expert: a `ProductFn` for every device, dtype and size."""
    parts = tokens.split(counts.tolist())
    return torch.cat([part @ matrix for part, matrix in zip(parts, matrices.unbind(), strict=True)])


def in_groups(tokens: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """torch's grouped product: a `ProductFn` where `product_for` says so."""
    ends = counts.to(tokens.device).cumsum(0, dtype=torch.int32)
    found = F.grouped_mm(tokens.contiguous(), matrices, offs=ends)
    if found.requires_grad:
        found.register_hook(Tensor.contiguous)  # its backward refuses gradients that are expanded
    return found


def product_for(dtype: torch.dtype, sizes: Sequence[int], platform: PlatformBase) -> ProductFn:
    """The product for matrices whose rows and columns have these sizes: grouped if torch has it for them."""
    aligned = all(size * dtype.itemsize % ALIGNMENT == 0 for size in sizes)
    has_it = str(dtype).removeprefix("torch.") in platform.grouped_products
    too_old = platform.device != "cpu" and platform.why_bfloat16_is_slow()
    return in_groups if aligned and has_it and not too_old else one_by_one


class ExpertMatrices(MegatronModule):  # type: ignore[misc]  # Megatron has no types
    """The weights of one rank's experts, of each kind in one parameter, and the adapters on them."""

    def __init__(self, num_local_experts: int, config: Any, is_transposed: bool) -> None:
        """`is_transposed` says whether the parameters hold each expert's matrix as [in, out], or as [out, in]."""
        super().__init__(config=config)
        self._experts = num_local_experts
        self._is_transposed = is_transposed
        hidden, inner = config.hidden_size, config.moe_ffn_hidden_size // config.expert_tensor_parallel_size
        self._product = product_for(config.params_dtype, (hidden, inner), current_platform())
        self.adapters = nn.ModuleDict()  # by name of the parameter, each `(results, tokens, counts) -> results`

    def times(self, tokens: Tensor, name: str, counts: Tensor) -> Tensor:
        """Tokens [t, in] in the order of the experts, times their experts' matrices and adapters: [t, out]."""
        matrices = self._of_each(getattr(self, name))
        out = self._product(tokens, matrices if self._is_transposed else matrices.transpose(1, 2), counts)
        return self.adapters[name](out, tokens, counts) if name in self.adapters else out

    def _of_each(self, parameter: Tensor) -> Tensor:
        """[experts * rows, columns] -> [experts, rows, columns]."""
        return parameter.view(self._experts, -1, parameter.shape[1])


class Experts(ExpertMatrices):
    """This rank's experts, or its share of them, with SiLU gates."""

    def __init__(self, num_local_experts: int, config: Any, pg_collection: Any = None) -> None:
        super().__init__(num_local_experts, config, is_transposed=False)
        hidden, inner = config.hidden_size, config.moe_ffn_hidden_size // config.expert_tensor_parallel_size
        self.gate_up_proj = empty(config, num_local_experts * 2 * inner, hidden)
        self.down_proj = empty(config, num_local_experts * hidden, inner)

    def forward(self, tokens: Tensor, counts: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """Tokens [t, H] in the order of the experts, how many each expert has, and each token's weight for it."""
        return self.from_gates(self.times(tokens, "gate_up_proj", counts), counts, weights), None

    def from_gates(self, both: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
        """The results [t, H] from gate and up [t, 2 inner]; selective recomputation calls it again."""
        gate, up = both.chunk(2, -1)
        return self.times((F.silu(gate) * up * weights[:, None]).to(both.dtype), "down_proj", counts)


def empty(config: Any, rows: int, columns: int) -> nn.Parameter:
    """A parameter of experts without values: the ranks that hold the same experts sum its gradient, and no others."""
    parameter = nn.Parameter(torch.empty(rows, columns, dtype=config.params_dtype))
    parameter.allreduce = False  # type: ignore[attr-defined]
    return parameter
