"""Memory of activations, and of an engine that is idle.

Of activations the backward may keep everything, only each layer's input, or that input in CPU memory:

    keep       layer 1's tensors, layer 2's ...                                              most memory, least work
    recompute  the input of each layer; the layer runs again in the backward                 (activation_checkpointing)
    offload    the same inputs, copied to CPU memory and brought back when their layer's turn comes

Copies use pinned memory and run in order on the computing stream, so no host thread waits for them. An
`OffloadingEngine` keeps its weights and optimizer state in CPU memory between the verbs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hone.engines.base import EngineSpec, Ranks
from hone.engines.engine import Engine
from hone.models.routing import checkpoint_contexts

LEAST_BYTES = 1 << 20  # moving a smaller tensor costs more than its memory is worth

Kept = Tensor | tuple[torch.device, Tensor]


def recompute_layers(body: Any) -> None:
    """Make a transformers model keep only the input of each layer, and recompute the rest in the backward."""
    body.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": checkpoint_contexts})


def kept_in_cpu_memory(least_bytes: int = LEAST_BYTES) -> AbstractContextManager[None]:
    """Keep in CPU memory what a forward in this context saves on an accelerator; weights stay where they are."""

    def pack(tensor: Tensor) -> Kept:
        if tensor.device.type == "cpu" or not worth_moving(tensor, least_bytes):
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return tensor.device, host.copy_(tensor, non_blocking=True)

    def unpack(kept: Kept) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        device, host = kept
        return host.to(device, non_blocking=True)

    return saved_tensors_hooks(pack, unpack)


def worth_moving(tensor: Tensor, least_bytes: int) -> bool:
    """Return whether a tensor saved by autograd is a result of the forward (not a weight) of at least `least_bytes`."""
    return not tensor.is_leaf and tensor.numel() * tensor.element_size() >= least_bytes


class OffloadingEngine(Engine):
    """An engine whose weights, optimizer state and gradients may wait in CPU memory while it is idle (`offload`)."""

    recomputes_parts = False  # whether the backend can recompute parts of layers

    def __init__(self, spec: EngineSpec, device: str, ranks: Ranks, offloads: bool) -> None:
        """Raises ValueError as `Engine` does, and for parts of layers that a backend cannot recompute."""
        config = spec.engine
        if config.activation_checkpointing == "selective" and not self.recomputes_parts:
            raise ValueError(
                f"{config.key_of('activation_checkpointing')}=selective: backend {config.backend.name} recomputes "
                "whole layers only; set it to true, or use a backend that has recompute_modules"
            )
        super().__init__(spec, device, ranks)
        self._home = device
        self.offloads = offloads
        self._at_work: frozenset[str] = frozenset()  # with `offload`: what is on the device now

    def initialize(self) -> None:
        super().initialize()
        if self.offloads:
            self.to("cpu")

    @contextmanager
    def _brought(self, parts: frozenset[str]) -> Iterator[None]:
        """Bring parts to the device for the duration, and take them away afterwards."""
        missing = parts - self._at_work
        if not missing:
            yield
            return
        self.to(self._home, **{part: part in missing for part in ("model", "optimizer", "grad")})
        self._at_work |= missing
        try:
            yield
        finally:
            self._at_work -= missing
            self.to("cpu", **{part: part in missing for part in ("model", "optimizer", "grad")})
