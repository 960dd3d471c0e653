"""Weights in two precisions: what the optimizer updates (masters) and what forward and backward use.

    masters (model.dtype) --publish--> working weights (compute_dtype) --forward, backward--> their gradients
         ^---------------- optimizer step <-- gradients summed in master precision <-- collect (each micro-batch)

With equal precisions both are the same tensors and nothing is copied. A bfloat16 weight has 8 significant bits: an
update smaller than a 256th of it would be lost there; the float32 master keeps it until it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from hone.engines.optimizers import gradient_norm
from hone.engines.shards import Part, Shard


class Weights:
    """The trainable weights of a model, by name, tied ones once."""

    def __init__(
        self, model: nn.Module, compute: torch.dtype, trained: bool, frozen: frozenset[str] = frozenset()
    ) -> None:
        """Turns `model` into the working copy, in place; without `trained`, no masters are kept.

        `frozen` names weights that keep their master although nothing updates it.
        """
        self._working = dict(model.named_parameters())
        self.masters: dict[str, Tensor] = {}
        self._kept: dict[str, Tensor] = {}
        keep = kept_wide(model)
        for name, parameter in self._working.items():
            master = parameter.data
            if compute != master.dtype and not keep(name):
                parameter.data = master.to(compute)
            if not trained:
                parameter.requires_grad_(False)
            same = parameter.dtype == master.dtype
            if parameter.requires_grad:
                self.masters[name] = parameter if same else nn.Parameter(master)
            elif name in frozen and not same:
                self._kept[name] = master
        self._apart = {n: m for n, m in (self.masters | self._kept).items() if m is not self._working[n]}

    def collect(self) -> None:
        """Add the working weights' gradients to the masters' and clear them: once after each backward."""
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
    def publish(self) -> None:
        """Round the masters into the working weights: once after each optimizer step."""
        if self._apart:
            torch._foreach_copy_([self._working[n] for n in self._apart], list(self._apart.values()))

    def settle(self) -> None:
        """Nothing is partial in one process."""

    def gradient_norm(self) -> float:
        """The 2-norm of all gradients together."""
        return gradient_norm(self.masters)

    def clear_gradients(self) -> None:
        for parameter in (*self._working.values(), *self.masters.values()):
            parameter.grad = None

    def best(self, name: str) -> Tensor:
        """A weight in the highest precision there is."""
        return self._apart.get(name, self._working[name]).detach()

    def names(self) -> list[str]:
        return list(self._working)

    def parts(self) -> Iterator[Part]:
        """Each weight once, in the highest precision there is (live), all of it."""
        for name, weight in self._working.items():
            yield name, self.best(name), Shard.whole(weight)

    def move(self, device: str, *, model: bool, optimizer: bool, grad: bool) -> None:
        """Move working weights (`model`), masters kept apart (`optimizer`) and gradients to a device."""
        for parameter in self._working.values() if model else ():
            parameter.data = parameter.data.to(device)
        for master in self._apart.values() if optimizer else ():
            master.data = master.data.to(device)
        for weight in (*self._working.values(), *self._apart.values()) if grad else ():
            if weight.grad is not None:
                weight.grad = weight.grad.to(device)


def kept_wide(model: nn.Module) -> Callable[[str], bool]:
    """Weights that an architecture wants in float32 whatever the rest is computed in (some routers)."""
    parts = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return lambda name: any(part in name for part in parts)
