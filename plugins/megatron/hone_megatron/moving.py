"""Weights and gradients of Megatron's buffers between the device and CPU memory.

Parameters, buckets and hone's masters are views of one buffer. They move together: each becomes the same view of the
buffer's new memory. Megatron's own `offload_to_cpu` empties the memory under these views instead, and whoever reads a
weight meanwhile (a weight sync, a checkpoint) would read nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor, nn


@torch.no_grad()
def relocate(tensors: Iterable[Tensor], device: str) -> None:
    """Move tensors in place; those that share memory share it there too."""
    moved: dict[int, Tensor] = {}
    for tensor in tensors:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in moved:
            old = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(memory)
            moved[memory.data_ptr()] = old.to(device, copy=True)
        new = moved[memory.data_ptr()].untyped_storage()
        view = torch.empty(0, dtype=tensor.dtype, device=device)
        tensor.data = view.set_(new, tensor.storage_offset(), tensor.shape, tensor.stride())


def keep_hooks(part: DistributedDataParallel) -> None:
    """Have gradients reach Megatron's buffers also after the weights have been on another device.

    Megatron adds a gradient to its buffer in a hook on the parameter's gradient accumulator, which torch replaces when
    the parameter's device changes. A hook on the parameter stays. Where both run, the second finds no gradient.
    """
    for parameter in part.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(part._make_backward_post_hook(parameter))


class Buffers:
    """Megatron's buffers of one engine; without any, the model is never trained."""

    def __init__(self, parts: Sequence[nn.Module], home: torch.device) -> None:
        """`parts` are this rank's parts of the model; `home` is the device that computes."""
        self._parts: Any = [part for part in parts if isinstance(part, DistributedDataParallel)]
        self._home = home
        self._freed = False
        self.is_cleared = True  # whether all gradients are zero

    def __iter__(self) -> Iterator[Any]:
        for part in self._parts:
            yield from (*part.buffers, *part.expert_parallel_buffers)

    def weights(self) -> Iterator[Tensor]:
        """Every tensor that Megatron keeps of the weights."""
        for buffer in self:
            yield buffer.param_data
            yield from (bucket.param_data for bucket in buffer.buckets)

    def gradients(self) -> Iterator[Tensor]:
        """Every tensor that Megatron keeps of the gradients."""
        for buffer in self:
            yield buffer.grad_data
            yield from (bucket.grad_data for bucket in buffer.buckets)
            yield from (parameter.main_grad for parameter in buffer.params)

    def forget_shards(self) -> None:
        """Have Megatron cut its buffers into the shares of ranks anew, which it remembers as views."""
        for part in self._parts:
            for group in (*part.bucket_groups, *part.expert_parallel_bucket_groups):
                for shards in (group.cached_param_buffer_shard_list, group.cached_grad_buffer_shard_list):
                    shards[:] = [None] * len(shards)

    def move_gradients(self, device: str, views: Iterable[Tensor]) -> None:
        """Move gradients, of which hone has further `views`; if all are zero, free their memory meanwhile."""
        if self._freed:
            if torch.device(device).type == self._home.type:
                self._fill()
        elif self.is_cleared and device == "cpu":
            for buffer in self:
                buffer.grad_data.untyped_storage().resize_(0)
            self._freed = True
        else:
            relocate([*self.gradients(), *views], device)

    def _fill(self) -> None:
        for buffer in self:
            buffer.grad_data.untyped_storage().resize_(buffer.grad_data.nbytes)
            buffer.grad_data.zero_()
        self._freed = False
