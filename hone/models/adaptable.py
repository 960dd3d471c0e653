"""Layers of a model that can have an adapter: linear layers, but for those whose weight is also read in another way."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Container, Iterable, Iterator
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

_NO_VALUES = ("dtype", "device", "shape")  # attributes of a weight that are not its values


def default_targets(model: Any) -> tuple[list[str], dict[str, str]]:
    """The layers that `all-linear` adapts in a model, as far as PEFT knows their names; and the others, and why not."""
    linears = linear_layers(model)
    unfit = unfit_layers(model, linears, ())
    return [path for path in linears if path not in unfit], unfit


def unfit_layers(model: nn.Module, linears: Iterable[str], mistaken: Container[str]) -> dict[str, str]:
    """Linear layers that cannot have an adapter, and why: it would have no effect, or not the same after merging."""
    reads = {cls: _read_weights(cls) for cls in {type(module) for module in model.modules()}}
    read = {f"{path}.{child}" for path, module in model.named_modules() for child in reads[type(module)]}
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    shared = {name.removesuffix(".weight") for pair in tied.items() for name in pair}
    found = {}
    for path in linears:
        if path in read:
            found[path] = "the layer around it computes with its weight itself, so an adapter would have no effect"
        elif path in shared:
            found[path] = "layers share its weight, so their adapters could not be merged into it"
        elif last_names(path, 1) in mistaken:
            found[path] = "PEFT takes its name for the model's experts"
    return found


def _read_weights(cls: type[nn.Module]) -> frozenset[str]:
    """Children whose `weight` the code of a module reads (`self.child.weight`), outside of its constructor."""
    found = set()
    for function in (one for base in cls.__mro__ for one in vars(base).values() if inspect.isfunction(one)):
        code = inspect.unwrap(function).__code__
        if code.co_name.startswith(("__init__", "init", "_init")):
            continue
        for before, this, after in _triples([(one.opname, one.argval) for one in dis.get_instructions(code)]):
            if this == ("LOAD_ATTR", "weight") and before[0] == "LOAD_ATTR" and after[1] not in _NO_VALUES:
                found.add(str(before[1]))
    return frozenset(found)


def _triples(steps: list[tuple[str, Any]]) -> Iterator[tuple[tuple[str, Any], ...]]:
    return zip(steps, steps[1:], [*steps[2:], ("", None)], strict=False)


def linear_layers(model: Any) -> list[str]:
    """All but the head, whose logits are computed from its weight (see `logprobs`), routers and indexers.

    A router is named so, or its class is (Llama 4's returns two tensors); an indexer (`attention.indexed`) gets no
    gradient.
    """
    head = model.get_output_embeddings()
    linears = [path for path, one in model.named_modules() if isinstance(one, nn.Linear | Conv1D) and one is not head]
    routers = {path for path in linears if type(model.get_submodule(path)).__name__.endswith("Router")}
    routers |= {path for path in linears if last_names(path, 1) == "router"}
    return [path for path in linears if path not in routers and ".indexer." not in path]


def last_names(path: str, parts: int) -> str:
    """The last parts of a dotted name."""
    return ".".join(path.split(".")[-parts:])


__all__ = ["default_targets", "last_names", "linear_layers", "unfit_layers"]
