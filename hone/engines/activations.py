"""Activation memory: keep everything for the backward, only each layer's input, or that input in CPU memory.

    keep       layer 1's tensors, layer 2's ...                                              most memory, least work
    recompute  the input of each layer; the layer runs again in the backward                 (activation_checkpointing)
    offload    the same inputs, copied to CPU memory and brought back when their layer's turn comes

Copies use pinned memory and run in order on the computing stream, so no host thread waits for them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

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
    """Whether a tensor saved by autograd is a result of the forward (not a weight) of at least `least_bytes`."""
    return not tensor.is_leaf and tensor.numel() * tensor.element_size() >= least_bytes
