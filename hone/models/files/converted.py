"""Weights that the files hold in other parts, as whole tensors, so that a rank can take its shard of each.

transformers takes a rank's part of each tensor of the files, and converts the parts. That is right where experts are
stacked. Where rows of several tensors are joined (the convolutions of Kimi-Linear and OLMo-Hybrid), or a tensor is
transposed or cut, a rank would hold another part of the weight than it should.
Upstream: https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/core_model_loading.py
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)


def keeps_shards(converter: WeightConverter) -> bool:
    """Return whether a rank may convert its shards of the files' tensors: true where experts are stacked."""
    chain = converter.operations
    return all(
        isinstance(one, MergeModulelist) or (isinstance(one, Concatenate) and one.dim == 1 and len(chain) == 2)
        for one in chain
    )


class _Parts:
    """The tensors of the files that become one or several weights, and their converter."""

    def __init__(self, converter: WeightConverter, first: str, model: Any) -> None:
        self._converter, self._first, self._model = converter, first, model
        self._sources: list[tuple[str, str, Any]] = []  # name, pattern and tensor, in the order of names

    def add(self, name: str, pattern: str, tensor: Any) -> None:
        self._sources.append((name, pattern, tensor))

    def convert(self, read: bool = True) -> dict[str, Tensor]:
        """All weights by name, whole; without `read` only their shapes."""
        own = deepcopy(self._converter)
        for name, pattern, tensor in self._sources:
            shape = tensor.shape if isinstance(tensor, Tensor) else tensor.get_shape()
            one: Any = tensor[...] if read else torch.empty(list(shape), device="meta")
            own.add_tensor(self._first, name, pattern, one)
        found = own.convert(self._first, model=self._model, config=self._model.config)
        return {key: value[0] if isinstance(value, list) else value for key, value in found.items()}


class _Weight:
    """One weight, read and converted when it is asked for; the interface is that of a slice of a safetensors file."""

    def __init__(self, parts: _Parts, name: str, shape: list[int]) -> None:
        self._parts, self._name, self._shape = parts, name, shape

    def get_shape(self) -> list[int]:
        return self._shape

    def __getitem__(self, index: Any) -> Tensor:
        return self._parts.convert()[self._name][index].clone()  # a view would keep the whole weight


def convert_first(
    model: Any, tensors: Mapping[str, Any], mapping: list[Any]
) -> tuple[dict[str, Any], list[WeightConverter | WeightRenaming]]:
    """Put whole weights in place of the tensors whose shards do not convert by themselves.

    `tensors`: name in the files -> tensor, which is read when it is indexed. `mapping`: transformers' list of changes
    between the files and `model`. `model` is empty and sharded. Returns the tensors, and the changes that are left.
    """
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    if all(keeps_shards(one) for one in converters):
        return dict(tensors), mapping
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    wanted = model.state_dict()
    left: dict[str, Any] = {}
    joined: dict[str, _Parts] = {}
    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, wanted)
        if pattern is None or target not in wanted or keeps_shards(by_pattern[pattern]):
            left[name] = tensors[name]
        else:
            joined.setdefault(target, _Parts(by_pattern[pattern], target, model)).add(name, pattern, tensors[name])
    for parts in joined.values():
        left |= {name: _Weight(parts, name, list(one.shape)) for name, one in parts.convert(read=False).items()}
    return left, [one for one in mapping if not isinstance(one, WeightConverter) or keeps_shards(one)]


__all__ = ["convert_first", "keeps_shards"]
