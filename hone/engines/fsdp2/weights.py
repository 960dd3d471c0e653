"""Weights in two precisions: the optimizer updates masters, forward and backward use working weights.

    one process    masters (model.dtype) --publish--> working weights (compute_dtype) --forward, backward--> gradients
                        ^------ optimizer step <-- gradients in master precision <-- collect (each micro-batch)

    on a mesh      shards (model.dtype) --all-gather in compute_dtype--> layer --backward--> gradients
                        ^------ optimizer step on local tensors <-- reduce-scatter, summed in float32 <--'

With equal precisions, masters and working weights are the same tensors and nothing is copied. A bfloat16 weight has 8
significant bits and would lose an update smaller than a 256th of it; the float32 master adds such updates up.

On a mesh the optimizer sees local tensors, never a DTensor: tensors of all meshes (tensor parallel, experts, plain) go
through the same fused kernels, and an elementwise update of a part is the same part of the whole update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hone.engines.base import Ranks
from hone.engines.fsdp2.exchange import Held, everyones_boxes, exchange
from hone.engines.fsdp2.shards import MeshPart, MeshShard, gather, local_part
from hone.engines.parts import CastFn, Part, Whole
from hone.models.numerics.precision import wide_weights
from hone.models.parts.boxes import BoxMap, around
from hone.models.parts.views import Reads, viewed


def cast_working(model: nn.Module, compute: torch.dtype) -> None:
    """Cast the parameters of a model to the working precision, in place."""
    wide = wide_weights(model)
    for name, parameter in model.named_parameters():
        if compute != parameter.dtype and not wide(name):
            parameter.data = parameter.data.to(compute)


class ProcessWeights:
    """The weights of a model in one process; implements `hone.engines.parts.Weights`."""

    def __init__(
        self, model: nn.Module, compute: torch.dtype, trained: bool, frozen: frozenset[str] = frozenset()
    ) -> None:
        """Cast `model` to the working precision, in place; without `trained`, no masters are kept.

        `frozen` names weights that keep a master although no optimizer updates them.
        """
        self._model = model
        self._working = dict(model.named_parameters())
        self.masters: dict[str, Tensor] = {}
        kept: dict[str, Tensor] = {}
        wide = wide_weights(model)
        for name, parameter in self._working.items():
            master = parameter.data
            if compute != master.dtype and not wide(name):
                parameter.data = master.to(compute)
            if not trained:
                parameter.requires_grad_(False)
            same = parameter.dtype == master.dtype
            if parameter.requires_grad:
                self.masters[name] = parameter if same else nn.Parameter(master)
            elif name in frozen and not same:
                kept[name] = master
        self._apart = {n: m for n, m in (self.masters | kept).items() if m is not self._working[n]}

    def collect(self) -> None:
        """Add the working weights' gradients to the masters' and clear them."""
        for name, master in self._apart.items():
            grad = self._working[name].grad
            if grad is None:
                continue
            if master.grad is None:
                master.grad = grad.to(master.dtype)
            else:
                master.grad.add_(grad)
            self._working[name].grad = None

    @torch.no_grad()
    def publish(self, names: frozenset[str] | None = None) -> None:
        """Round the masters into the working weights."""
        apart = {name: one for name, one in self._apart.items() if names is None or name in names}
        if apart:
            torch._foreach_copy_([self._working[n] for n in apart], list(apart.values()))

    def settle(self) -> None:
        """In one process every gradient is complete."""

    def gradient_norm(self) -> float:
        """Accumulated in float32 at least; 0 if there are no gradients."""
        grads = [master.grad for master in self.masters.values() if master.grad is not None]
        return float(torch.nn.utils.get_total_norm(grads)) if grads else 0.0

    def clear_gradients(self) -> None:
        for parameter in (*self._working.values(), *self.masters.values()):
            parameter.grad = None

    def parts(self) -> Iterator[Part]:
        for name, weight in self._working.items():
            yield name, self._best(name), Whole(tuple(weight.shape))

    def trained(self) -> Iterator[Part]:
        for name, master in self.masters.items():
            yield name, master, Whole(tuple(master.shape))

    def chosen(self, names: frozenset[str]) -> dict[str, Tensor]:
        return {name: self._best(name).clone() for name in self._working if name in names}

    def whole(self, cast: CastFn | None = None) -> Iterator[tuple[str, Tensor]]:
        state = {name: tensor.detach() for name, tensor in self._model.state_dict().items()}
        of_storage = {state[name].data_ptr(): name for name in self._working if name in state}
        for name, tensor in state.items():
            owner = of_storage.get(tensor.data_ptr())
            best = self._best(owner) if owner else tensor
            found = best if cast is None else cast(name, best)
            yield name, found.clone() if found is best else found

    def _best(self, name: str) -> Tensor:
        """A weight in the highest precision there is."""
        return self._apart.get(name, self._working[name]).detach()

    def move(self, device: str, *, model: bool, optimizer: bool, grad: bool) -> None:
        """Move working weights (`model`), masters that are tensors of their own (`optimizer`) and gradients."""
        for parameter in self._working.values() if model else ():
            parameter.data = parameter.data.to(device)
        for master in self._apart.values() if optimizer else ():
            master.data = master.data.to(device)
        for weight in (*self._working.values(), *self._apart.values()) if grad else ():
            if weight.grad is not None:
                weight.grad = weight.grad.to(device)


@dataclass(slots=True)
class Partial:
    """Weights that a group of ranks holds alike, each rank computing a part of their gradients."""

    group: Any
    names: list[str] = field(default_factory=list)  # or ends of names

    def has(self, name: str) -> bool:
        return f".{name}".endswith(tuple(f".{one}" for one in self.names))


class ShardedWeights:
    """The weights of a model on any mesh, as DTensors; implements `hone.engines.parts.Weights`."""

    def __init__(
        self,
        model: nn.Module,
        ranks: Ranks,
        trained: bool,
        partial: Sequence[Partial] = (),
        rename: Callable[[str], str] | None = None,
    ) -> None:
        """`rename` gives the names in transformers' state dict of a model that has other ones."""
        self._model = model
        self._ranks = ranks
        self._rename = rename or str
        self._sharded = {self._rename(name): weight for name, weight in model.named_parameters()}
        if not trained:
            for weight in self._sharded.values():
                weight.requires_grad_(False)
        self.masters: dict[str, Tensor] = {
            name: nn.Parameter(local_part(weight.detach()))
            for name, weight in self._sharded.items()
            if weight.requires_grad
        }
        self._shards = {name: MeshShard.of(weight.detach(), ranks) for name, weight in self._sharded.items()}
        self._needs: Sequence[BoxMap] = ()  # of every rank; empty: ranks gather whole weights
        self._held: dict[str, Held] = {}  # what every rank holds, once it was asked
        self._summed = [(one.group, [name for name in self.masters if one.has(name)]) for one in partial]

    def collect(self) -> None:
        """Give the masters the gradients that `fully_shard` has summed over ranks and micro-batches."""
        for name, master in self.masters.items():
            grad = self._sharded[name].grad
            master.grad = None if grad is None else local_part(grad)

    def settle(self) -> None:
        for group, names in self._summed:
            grads = [grad for name in names if (grad := self.masters[name].grad) is not None]
            if grads:
                flat = torch.cat([grad.reshape(-1) for grad in grads])
                dist.all_reduce(flat, group=group)
                for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                    grad.copy_(part.view_as(grad))

    def gradient_norm(self) -> float:
        total = torch.zeros((), dtype=torch.float64)
        for name, master in self.masters.items():
            if master.grad is not None and master.grad.numel():
                wide = torch.promote_types(master.grad.dtype, torch.float32)
                square = torch.linalg.vector_norm(master.grad, dtype=wide).double().square()
                total = total.to(square.device) + square / self._shards[name].copies
        some = next(iter(self.masters.values()))
        return math.sqrt(float(self._ranks.sum(total.to(some.device))))

    def publish(self, names: frozenset[str] | None = None) -> None:
        """Masters and shards are the same memory: the next forward gathers the new values."""

    def clear_gradients(self) -> None:
        for weight in (*self._sharded.values(), *self.masters.values()):
            weight.grad = None

    def parts(self) -> Iterator[MeshPart]:
        for name, weight in self._sharded.items():
            yield name, local_part(weight.detach()), self._shards[name]

    def trained(self) -> Iterator[MeshPart]:
        for name, master in self.masters.items():
            yield name, master, self._shards[name]

    def chosen(self, names: frozenset[str]) -> dict[str, Tensor]:
        return dict(gather(part for part in self.parts() if part[0] in names))

    def whole(self, cast: CastFn | None = None) -> Iterator[tuple[str, Tensor]]:
        names: dict[int, list[str]] = {}
        for name, weight in self._model.named_parameters(remove_duplicate=False):
            names.setdefault(id(weight), []).append(self._rename(name))
        aliases = {same[0]: same for same in names.values()}
        parts = self.parts()
        if cast is not None:
            parts = ((name, cast(name, local), shard) for name, local, shard in parts)
        for name, tensor in self._exchanged(parts, aliases) if self._needs else gather(parts):
            yield name, tensor
            for alias in aliases[name][1:]:
                yield alias, tensor if self._needs else tensor.clone()
        weights = {alias for same in aliases.values() for alias in same}
        for name, tensor in self._model.state_dict().items():
            if self._rename(name) not in weights:
                yield self._rename(name), tensor.clone()

    @contextmanager
    def needed(self, needs: Sequence[BoxMap]) -> Iterator[None]:
        """See `parts.PartlyGathered`."""
        self._needs = needs
        try:
            yield
        finally:
            self._needs = ()

    def layout(self) -> dict[str, Tensor]:
        state = self._model.state_dict().items()
        return {self._rename(name): torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in state}

    def _exchanged(
        self, parts: Iterator[MeshPart], aliases: Mapping[str, Sequence[str]]
    ) -> Iterator[tuple[str, Tensor]]:
        self._held = self._held or everyones_boxes(self.parts())
        needs = [{name: around([need[one] for one in same]) for name, same in aliases.items()} for need in self._needs]
        for name, part, boxed in exchange(parts, self._held, needs):
            yield name, viewed(name, part, Reads(), boxed)

    def move(self, device: str, *, model: bool, optimizer: bool, grad: bool) -> None:
        """Move the shards (`model`), which are the masters too, with their gradients."""
        if model:
            self._model.to(device)
            for name, master in self.masters.items():
                master.data = local_part(self._sharded[name].detach())
            self.collect()
