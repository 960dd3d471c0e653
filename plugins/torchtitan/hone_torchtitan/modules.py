"""Modules in place of torchtitan's own, so that a decoder computes as transformers' does.

    PaddedEmbedding   the pad token gets no gradient as an input
    Rotary            transformers' frequencies, for the positions of the batch
    PackedAttention   attention within the packed sequences
    CalledHead        hands hidden states and the weight to a function, which never makes whole logits

torchtitan's sharding goes by the names of modules, weights and arguments, so these are torchtitan's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.protocols.module import Module

from hone.engines.fsdp2.shards import local_part
from hone.models.attention.packed import packed_attention_forward

Outputs = dict[str, Any]  # tensors, or dicts of them: the hooks of `fully_shard` look into no other objects
UseFn = Callable[[Tensor, Tensor], Outputs]
"""Hidden states [1, T, H] of the row, and this rank's rows of the head's weight -> what the forward returns."""


class PaddedEmbedding(Embedding):  # type: ignore[misc]  # torchtitan has no types
    """An embedding whose pad token gets no gradient as an input, as transformers' has; a tied head still trains it."""

    @dataclass(kw_only=True, slots=True)
    class Config(Embedding.Config):  # type: ignore[misc]
        padding_token: int | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._padding_token = config.padding_token

    def forward(self, input: Tensor) -> Tensor:
        found: Tensor = super().forward(input)
        if self._padding_token is None:
            return found
        return torch.where((input == self._padding_token)[..., None], found.detach(), found)


class Rotary(CosSinRoPE):  # type: ignore[misc]
    """Rotary positions with transformers' frequencies. Angles are computed for a row's positions, not for all."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):  # type: ignore[misc]
        frequencies: Tensor  # [d / 2]
        scale: float  # of cosines and sines

    def _precompute_cache(self) -> Tensor:
        frequencies: Tensor = self.config.frequencies
        return frequencies.to(torch.get_default_device())

    def _reshape_cache(self, query: Tensor, positions: Tensor | None = None) -> Tensor:
        """Cosines and sines [1, T, 1, 2 d] for positions [1, T]; a DTensor where the queries are one."""
        assert positions is not None
        angles = positions[..., None].float() * local_part(self.cache)
        angles = torch.cat([angles, angles], -1)
        table: Tensor = torch.cat([angles.cos(), angles.sin()], -1)[:, :, None] * self.config.scale
        if not isinstance(query, DTensor):
            return table
        mesh = query.device_mesh
        return DTensor.from_local(table, mesh, [Replicate()] * mesh.ndim, run_check=False)


class PackedAttention(Module):  # type: ignore[misc]
    """Causal attention within the packed sequences of `hone.models.attention.packed`; implements an inner attention."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):  # type: ignore[misc]
        window: int | None = None

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._window = config.window

    def forward(
        self,
        q_BLNH: Tensor,  # noqa: N803  torchtitan shards arguments by these names
        k_BLNH: Tensor,  # noqa: N803
        v_BLNH: Tensor,  # noqa: N803
        *,
        scale: float,
        **_: Any,
    ) -> Tensor:
        """Queries, keys and values [1, T, heads, d] of this rank's heads -> [1, T, heads, d]."""
        query, key, value = (one.transpose(1, 2) for one in (q_BLNH, k_BLNH, v_BLNH))
        mixed, _weights = packed_attention_forward(
            self, query, key, value, None, scaling=scale, sliding_window=self._window
        )
        return mixed


class CalledHead(Linear):  # type: ignore[misc]
    """A head that calls a function with what it would multiply, within the forward of the decoder.

    So `fully_shard` gathers the weight for the function, and treats its outputs like outputs of the forward.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._use: UseFn | None = None

    @contextmanager
    def calling(self, use: UseFn) -> Iterator[None]:
        """Let forwards in this context call `use`."""
        self._use = use
        try:
            yield
        finally:
            self._use = None

    def forward(self, input: Tensor) -> Outputs:
        assert self._use is not None
        weight: Tensor = self.weight
        if isinstance(input, DTensor) and isinstance(weight, DTensor):
            # ranks that have slices of the weight compute parts of the states' gradient
            placements = [Partial() if one.is_shard() else Replicate() for one in weight.placements]
            input = input.to_local(grad_placements=placements)
        return self._use(input, local_part(weight))
