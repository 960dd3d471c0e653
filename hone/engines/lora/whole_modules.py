"""Modules that are trained whole, in addition to an adapter (PEFT: modules_to_save): a head, embeddings, norms.

module  --base_layer-->  as it was loaded, frozen; used without the adapter
        --trained----->  a copy that learns; tied copies stay one tensor
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hone.engines.lora.adapter_files import AdapterError
from hone.registry import unknown

SCORE_MODULE = "score"  # a value head, which is no part of the adapted body and is trained anyway


class WholeModule(nn.Module):
    """Takes the place of a module: its trained copy, or the module itself while the adapter is off."""

    def __init__(self, module: nn.Module, adapter: str) -> None:
        super().__init__()
        self.base_layer = module
        self.trained = nn.ModuleDict({adapter: copy.deepcopy(module)})
        self.disabled = False
        self._adapter = adapter

    @property
    def active(self) -> nn.Module:
        return self.base_layer if self.disabled else self.trained[self._adapter]

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self.active(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        """Attributes of the module itself (`weight`, `num_embeddings` ...)."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("base_layer", "trained"):
                raise
            return getattr(self.active, name)


@dataclass(frozen=True, slots=True)
class Whole:
    """One such module of a model."""

    path: str
    module: WholeModule
    adapter: str

    def parameters(self) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        """Name within the module, the trained one, the frozen one."""
        base = dict(self.module.base_layer.named_parameters(remove_duplicate=False))
        for name, weight in self.module.trained[self.adapter].named_parameters(remove_duplicate=False):
            yield name, weight, base[name]

    def take_buffers(self, device: str) -> None:
        """Copy the base's buffers, which are computed when a model is loaded (the scale of embeddings).

        The copy was made when the model was empty.
        """
        copies = dict(self.module.trained[self.adapter].named_modules())
        for path, module in self.module.base_layer.named_modules():
            for name, buffer in module._buffers.items():
                copies[path]._buffers[name] = None if buffer is None else buffer.detach().clone().to(device)

    def tensor(self, name: str) -> str:
        return f"{self.path}.trained.{self.adapter}.{name}"

    def place(self, name: str, weight: nn.Parameter) -> None:
        owner, _, last = name.rpartition(".")
        setattr(self.module.trained[self.adapter].get_submodule(owner), last, weight)


def find_whole(model: Any, names: Sequence[str], of: str, key: str) -> list[str]:
    """Find the modules whose paths end with one of `names`; a tied head brings its embeddings.

    A value model's `score` is trained anyway and may be named. Raises AdapterError for a name that no module has; it
    calls the model `of` and the setting `key`.
    """
    modules = {path: one for path, one in model.named_modules() if path and next(one.parameters(), None) is not None}
    found: list[str] = []
    for name in names:
        matching = [path for path in modules if f".{path}".endswith(f".{name}")]
        if not matching and name == SCORE_MODULE and model.get_output_embeddings() is None:
            continue
        if not matching:
            known = sorted({path.rpartition(".")[2] for path in modules})
            raise AdapterError(f"{key}: {unknown(f'module of {of}', name, known)}")
        found += matching
    ends = [one for one in (model.get_input_embeddings(), model.get_output_embeddings()) if one is not None]
    if len(ends) == 2 and ends[0].weight is ends[1].weight and any(modules[path] in ends for path in found):
        found += [path for path, one in modules.items() if one in ends]
    chosen = [path for path in modules if path in found and not any(path.startswith(f"{one}.") for one in found)]
    for path in chosen:
        weights = dict(modules[path].named_parameters(remove_duplicate=False))
        if other := sorted(modules[path].state_dict().keys() - weights.keys()):
            raise AdapterError(
                f"{key}: {path} keeps {other[0]}, which is no weight, and files of adapters "
                "cannot hold it; leave the module out"
            )
    return chosen


def check_mesh(paths: Sequence[str], key: str, parallel: str) -> None:
    """Raise AdapterError for a module within a layer: other ranks hold parts of it, as the settings `parallel` say."""
    for path in paths:
        if ".layers." in f".{path}.":
            raise AdapterError(
                f"{key}: {path} is within a layer, and such modules can be trained whole only with {parallel}.tensor "
                f"and {parallel}.expert at 1; heads, embeddings and last norms work with both"
            )


def wrap(model: Any, paths: Sequence[str], adapter: str, dtype: torch.dtype) -> list[Whole]:
    """Put each module and a copy of it, in `dtype`, in its place; copies of tied weights are one tensor."""
    found = []
    copies: dict[int, nn.Parameter] = {}
    for path in paths:
        wrapped = WholeModule(model.get_submodule(path), adapter)
        wrapped.trained.to(dtype)
        one = Whole(path, wrapped, adapter)
        for name, weight, base in list(one.parameters()):
            one.place(name, copies.setdefault(id(base), weight))
            copies[id(base)].requires_grad_()
        owner, _, child = path.rpartition(".")
        setattr(model.get_submodule(owner), child, wrapped)
        found.append(one)
    return found


def file_names(model: nn.Module, paths: Sequence[str]) -> list[str]:
    """Names that select just these modules for PEFT, which takes every module whose path ends with one."""
    names = [path for path, _ in model.named_modules()]
    found = []
    for path in paths:
        last = path.rpartition(".")[2]
        found.append(last if all(one in paths for one in names if one.endswith(last)) else path)
    return sorted(set(found))
