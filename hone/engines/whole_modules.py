"""Modules that are trained whole beside an adapter (PEFT: modules_to_save): a head, embeddings, norms.

module  --base_layer-->  as it was read, frozen: what there is without the adapter
        --trained----->  a copy that learns; tied copies stay one tensor
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hone.engines.adapter_files import AdapterError
from hone.engines.shards import TensorSplit
from hone.registry import unknown

SCORE_MODULE = "score"  # a value head, which is no part of the adapted body and is trained anyway


class WholeModule(nn.Module):
    """In the place of a module: its trained copy, or itself where the adapter is switched off."""

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
        """What the rest of the model asks of the module itself (`weight`, `num_embeddings` ...)."""
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
        """What is computed beside the weights when a model is read (the scale of embeddings): the copy's is the base's.

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


def find_whole(model: Any, names: Sequence[str], of: str) -> list[str]:
    """Paths of the modules whose paths end with one of `names`; a tied head and embeddings come together.

    A body has no head, and a value head is trained anyway: `score` is nothing to look for there. Raises AdapterError
    for a name that no module has.
    """
    modules = {path: one for path, one in model.named_modules() if path and next(one.parameters(), None) is not None}
    found: list[str] = []
    for name in names:
        matching = [path for path in modules if f".{path}".endswith(f".{name}")]
        if not matching and name == SCORE_MODULE and model.get_output_embeddings() is None:
            continue
        if not matching:
            known = sorted({path.rpartition(".")[2] for path in modules})
            raise AdapterError(f"engine.lora.modules_to_save: {unknown(f'module of {of}', name, known)}")
        found += matching
    ends = [one for one in (model.get_input_embeddings(), model.get_output_embeddings()) if one is not None]
    if len(ends) == 2 and ends[0].weight is ends[1].weight and any(modules[path] in ends for path in found):
        found += [path for path, one in modules.items() if one in ends]
    chosen = [path for path in modules if path in found and not any(path.startswith(f"{one}.") for one in found)]
    for path in chosen:
        weights = dict(modules[path].named_parameters(remove_duplicate=False))
        if beside := sorted(modules[path].state_dict().keys() - weights.keys()):
            raise AdapterError(
                f"engine.lora.modules_to_save: {path} keeps {beside[0]} beside its weights, and no file of an adapter "
                "has a place for it; leave the module out"
            )
    return chosen


def check_mesh(paths: Sequence[str], split: TensorSplit | None, experts_cut: bool) -> None:
    """Raise AdapterError for a module within a layer whose matrices or experts other ranks hold parts of."""
    for path in paths:
        if (split is not None or experts_cut) and ".layers." in f".{path}.":
            raise AdapterError(
                f"engine.lora.modules_to_save: {path} is within a layer, and such modules are trained whole with "
                "parallel.tensor and parallel.expert at 1 only; heads, embeddings and last norms work with both"
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
    """The names by which PEFT finds just these modules: it takes all whose paths end with one of them."""
    names = [path for path, _ in model.named_modules()]
    found = []
    for path in paths:
        last = path.rpartition(".")[2]
        found.append(last if all(one in paths for one in names if one.endswith(last)) else path)
    return sorted(set(found))
