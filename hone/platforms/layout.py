"""Ranks of a model in each dimension of its mesh, as a forecast of memory and time counts them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks of a model in each dimension; `expert` uses the others' ranks."""

    replicate: int = 1  # copies of the weights, each with batches of its own
    shard: int = 1  # that shard weights and batches
    sequence: int = 1  # that share the tokens of a micro-batch
    tensor: int = 1  # that split each layer's matrices
    expert: int = 1
    pipeline: int = 1  # stages of consecutive layers
    parts: int = 1  # of the model on each stage
    whole: bool = False  # ranks with other batches or tokens hold the same weights, and share optimizer state (ZeRO-1)
    between: bool = False  # tensor ranks share the tokens between those matrices, too

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard * self.sequence * self.tensor * self.pipeline

    @property
    def holders(self) -> int:
        """Ranks that share one copy of the weights."""
        return self.tensor * self.pipeline * (1 if self.whole else self.shard * self.sequence)

    @property
    def updaters(self) -> int:
        """Ranks that share one copy of the optimizer's state."""
        return self.ranks if self.whole else self.holders
