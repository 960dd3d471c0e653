"""The experts of gpt-oss: biases, a clamped gate, and matrices as its files have them.

Megatron's own MLP can clamp its gate, but wants the rows of gate and up one after the other. The files have them as
alternating columns of a transposed matrix, of which a row range of Megatron's parameter would be no box. So these
parameters have the layout of the files, all experts one under the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hone_megatron.modules.experts import ExpertMatrices, empty


class ClampedExperts(ExpertMatrices):
    """This rank's experts, or its share of them."""

    def __init__(self, num_local_experts: int, config: Any, pg_collection: Any) -> None:
        super().__init__(num_local_experts, config, is_transposed=True)
        self._alpha, self._limit = config.clamps
        self._adds_bias = pg_collection.expt_tp.rank() == 0
        hidden, inner = config.hidden_size, config.moe_ffn_hidden_size // config.expert_tensor_parallel_size
        self.gate_up_proj = empty(config, num_local_experts * hidden, 2 * inner)
        self.gate_up_proj_bias = empty(config, num_local_experts, 2 * inner)
        self.down_proj = empty(config, num_local_experts * inner, hidden)
        self.down_proj_bias = empty(config, num_local_experts, hidden)

    def forward(self, tokens: Tensor, counts: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """Tokens [t, H] in the order of the experts, how many each expert has, and each token's weight for it."""
        both = self.times(tokens, "gate_up_proj", counts)
        return self.from_gates(both + self.gate_up_proj_bias[_experts_of(both, counts)], counts, weights), None

    def from_gates(self, both: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
        """The results [t, H] from gates and what they scale [t, 2 inner]; selective recomputation calls it again."""
        gate, up = both[:, 0::2].clamp(max=self._limit), both[:, 1::2].clamp(-self._limit, self._limit)
        inner = (up + 1) * gate * torch.sigmoid(gate * self._alpha)
        out = self.times(inner, "down_proj", counts)
        out = (out + self._last_bias()[_experts_of(both, counts)]) * weights[:, None]
        return out.to(both.dtype)

    def _last_bias(self) -> Tensor:
        """The bias of the results on the first of the ranks that share an expert, zeros on the others.

        Each of them has the bias, and the whole gradient for it.
        """
        bias: Tensor = self.down_proj_bias
        return bias if self._adds_bias else bias - bias.detach()


def _experts_of(tokens: Tensor, counts: Tensor) -> Tensor:
    """The number of each token's expert here, [t]."""
    return torch.repeat_interleave(counts.to(tokens.device), output_size=len(tokens))
