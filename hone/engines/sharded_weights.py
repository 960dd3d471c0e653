"""Weights on a mesh: `fully_shard` holds this rank's shards, and the optimizer updates them in place.

    shards (model.dtype) --all-gather, compute_dtype--> layer --backward--> gradients --reduce-scatter--> shards'
         ^--------------------------- optimizer step on the local tensors <------------------------------'

The optimizer never sees a DTensor: local tensors of all meshes (tensor parallel, experts, plain) go through the same
fused kernels, and an update that works element by element is the same on a part as on the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hone.engines.mesh import TENSOR, Mesh
from hone.engines.shards import Part, Shard


class ShardedWeights:
    """The weights of a sharded model, by name, tied ones once; see `hone.engines.precision.Weights`."""

    def __init__(self, model: nn.Module, mesh: Mesh, trained: bool, partial: Sequence[str]) -> None:
        """`partial` names weights (or ends of names) whose gradients are to be summed over the tensor ranks."""
        self._model = model
        self._mesh = mesh
        self._sharded = dict(model.named_parameters())
        if not trained:
            for weight in self._sharded.values():
                weight.requires_grad_(False)
        self.masters: dict[str, Tensor] = {
            name: nn.Parameter(_local(weight.detach()))
            for name, weight in self._sharded.items()
            if weight.requires_grad
        }
        self._shards = {name: Shard.of(weight.detach(), mesh) for name, weight in self._sharded.items()}
        ends = tuple(f".{name}" for name in partial)
        self._partial = [name for name in self.masters if ends and f".{name}".endswith(ends)]

    def collect(self) -> None:
        """Show the masters their gradients, which `fully_shard` has summed over ranks and micro-batches."""
        for name, master in self.masters.items():
            grad = self._sharded[name].grad
            master.grad = None if grad is None else _local(grad)

    def settle(self) -> None:
        """Finish what backward left partial: once before each optimizer step."""
        grads = [grad for name in self._partial if (grad := self.masters[name].grad) is not None]
        if grads:
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            dist.all_reduce(flat, group=self._mesh.dense.get_group(TENSOR))
            for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))

    def gradient_norm(self) -> float:
        """The 2-norm of all gradients of all ranks together; a part that several ranks hold counts once."""
        total = torch.zeros((), dtype=torch.float64)
        for name, master in self.masters.items():
            if master.grad is not None and master.grad.numel():
                wide = torch.promote_types(master.grad.dtype, torch.float32)
                square = torch.linalg.vector_norm(master.grad, dtype=wide).double().square()
                total = total.to(square.device) + square / self._shards[name].copies
        some = next(iter(self.masters.values()))
        return math.sqrt(float(self._mesh.sum(total.to(some.device))))

    def publish(self) -> None:
        """Nothing to do: masters and shards are the same memory, and the next forward gathers them anew."""

    def clear_gradients(self) -> None:
        for weight in (*self._sharded.values(), *self.masters.values()):
            weight.grad = None

    def names(self) -> list[str]:
        return list(self._sharded)

    def parts(self) -> Iterator[Part]:
        """Each weight once: its name, what this rank holds of it (live), and which part of it that is."""
        for name, weight in self._sharded.items():
            yield name, _local(weight.detach()), self._shards[name]

    def move(self, device: str, *, model: bool, optimizer: bool, grad: bool) -> None:
        """Move the shards (`model`), which are the masters too, and their gradients with them."""
        if model:
            self._model.to(device)
            for name, master in self.masters.items():
                master.data = _local(self._sharded[name].detach())
            self.collect()


def _local(tensor: Tensor) -> Tensor:
    """A DTensor's own part, sharing its memory."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part
