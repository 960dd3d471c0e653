"""The contract of a rollout engine: tokens in; tokens, log-probs and the weight version of each token out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from hone.types import Completion, Metrics, SamplingParams


@dataclass(frozen=True, slots=True)
class WeightReceipt:
    """A replica's proof of what it serves after a weight sync: the digest of the weights it now holds."""

    replica: str
    version: int
    digest: str  # of (name, dtype, shape, bytes) of every weight as stored; see hone.models.digest
    tensors: int
    bytes: int


class RolloutEngine(Protocol):
    """One replica that generates. All coroutines run on one event loop."""

    @property
    def weight_version(self) -> int: ...

    async def generate(self, request_id: str, token_ids: tuple[int, ...], sampling: SamplingParams) -> Completion:
        """Continue `token_ids`. Raises ValueError for a request that cannot be served (too long, empty)."""

    async def update_weights(self, stream: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightReceipt:
        """Replace every weight; KV and prefix caches of older versions are dropped before the next token."""

    def expected_weights(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Name -> dtype and shape of every tensor that `update_weights` wants, tied heads included."""

    async def sleep(self, level: int) -> None:
        """Give memory back. Level 1: drop the KV cache; level 2: the weights too (they must be sent again)."""

    async def wake_up(self, tags: tuple[str, ...] = ("weights", "kv_cache")) -> None: ...

    async def abort_all(self) -> None:
        """End every running request now; each `generate` returns its partial tokens with `StopReason.ABORTED`."""

    async def pause(self) -> None:
        """Stop producing tokens; running requests wait."""

    async def resume(self) -> None: ...

    def metrics(self) -> Metrics:
        """Throughput and cache figures since the last call (`rollout/` names)."""
