"""Layers that vLLM quantises while it takes weights in (`rollout.engine.quantization`): what they serve is what came.

The digest of a sync covers the tensors as they were sent, and vLLM quantises them after that. So each such layer is
followed from there to the end of the update:

    filled with what came --vLLM quantises--> digest A --vLLM copies to the memory that serves--> digest B
             \\-- product with fixed rows --/   differ by the precision of the quantisation       A = B

Tested with vLLM 0.32.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hone.weights.base import WeightSyncError
from hone.weights.digests.digest import digest_tensors, method_for
from hone.workers.inside.receiving import listing

ROWS = 8
LARGEST_ERROR = 0.25
"""Of a product, relative to its norm: 0.037 was measured in fp8; half of a weight gives 0.5, another weight 1.4."""


class QuantisedLayers:
    """The quantised layers of a model during one update."""

    def __init__(self, layers: Iterable[tuple[str, torch.nn.Module]], linear: type) -> None:
        """`layers` are those with a quantising `quant_method`; `linear` is the class of those of linear layers."""
        self._layers: dict[torch.nn.Module, str] = {layer: name for name, layer in layers}
        self._linear = linear
        self._methods: list[Any] = list({id(layer.quant_method): layer.quant_method for layer in self._layers}.values())
        self._digests: dict[torch.nn.Module, str] = {}
        self._errors: dict[str, float] = {}

    def follow(self) -> None:
        """Note what each layer is quantised to from now on; `leave` ends it."""
        for method in self._methods:
            method.process_weights_after_loading = self._noting(method.process_weights_after_loading)

    def leave(self) -> None:
        for method in self._methods:
            del method.process_weights_after_loading  # the instance's; its class has vLLM's own

    def check(self) -> None:
        """Raise WeightSyncError unless every layer serves what it was quantised to, at a precision that can be."""
        far = [f"{name} ({error:.2f})" for name, error in self._errors.items() if not error <= LARGEST_ERROR]
        if far:
            raise WeightSyncError(
                f"quantised layers do not compute with the weights that came (error of a product, relative to its "
                f"norm; at most {LARGEST_ERROR} is rounding): {listing(far)}"
            )
        changed = [name for layer, name in self._layers.items() if self._digests.get(layer) != _digest(layer)]
        if changed:
            raise WeightSyncError(f"quantised layers do not serve what this update quantised: {listing(changed)}")

    def _noting(self, quantise: Callable[[Any], None]) -> Callable[[Any], None]:
        def process(layer: Any) -> None:
            rows = _fixed_rows(layer.weight) if isinstance(layer.quant_method, self._linear) else None
            expected = None if rows is None else rows @ layer.weight.t()
            quantise(layer)
            self._digests[layer] = _digest(layer)
            if rows is not None and expected is not None:
                found = layer.quant_method.apply(layer, rows, None)
                self._errors[self._layers[layer]] = float((found - expected).float().norm() / expected.float().norm())

        return process


def _fixed_rows(weight: Tensor) -> Tensor:
    rows = torch.randn(ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0))
    return rows.to(weight.device, weight.dtype)


def _digest(layer: torch.nn.Module) -> str:
    tensors = {name: one.data for name, one in {**layer._parameters, **layer._buffers}.items() if one is not None}
    return digest_tensors(tensors.items(), method_for(next(iter(tensors.values())).device))


__all__ = ["QuantisedLayers"]
