"""The RMS norm of every layer."""

from __future__ import annotations

from typing import Any

from torch import nn


class Norm(nn.RMSNorm):
    """Megatron's own torch norm refuses sequence parallelism; this one marks its weight, whose gradient is a sum."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
