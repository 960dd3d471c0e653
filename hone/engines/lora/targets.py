"""Targets of adapters: linear layers and, in a mixture, the weights of all experts."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from hone.engines.lora.adapter_files import AdapterError, StoredAdapter
from hone.engines.settings import LoraConfig
from hone.models.four_bit import has
from hone.registry import unknown

_NO_VALUES = ("dtype", "device", "shape")  # attributes of a weight that are not its values


@dataclass(frozen=True, slots=True)
class Split:
    """Split of the adapted model by a backend."""

    styles: Mapping[str, str]  # tensor-parallel style of each module, by its wildcard name
    tensor: Any  # DeviceMesh of the tensor ranks; None: tensor parallel is off
    experts: bool  # whether experts lie on different ranks
    key: str  # of the settings that say so: actor.backend.parallel


@dataclass(frozen=True, slots=True)
class Targets:
    """Full names of the adapted weights, and the shortest names that select them (for PEFT's files)."""

    modules: list[str]
    experts: list[str]  # each a weight [E, out, in] or [E, in, out]
    short_modules: list[str]
    short_experts: list[str]


def find_targets(
    model: Any, config: LoraConfig, name: str, whole: Sequence[str] = (), mistaken: Container[str] = ()
) -> Targets:
    """Find the weights that `config` targets in a transformers model, except in modules that are trained `whole`.

    `mistaken` are last names of linear layers that PEFT takes for experts in this model. Raises AdapterError, which
    calls the model `name`, for a target that cannot be adapted, or does not exist, with the nearest one.
    """
    linears, experts = _linears(model), _experts(model)
    unfit = unfit_layers(model, linears, mistaken)
    known = sorted({_last(path, 1) for path in linears} | {_last(path, 2) for path in experts})
    wanted = [path for path in linears if path not in unfit] if config.targets == "all-linear" else []
    for target in () if config.targets == "all-linear" else config.targets:
        found = [path for path in (*linears, *experts) if has(path, target)]
        if not found:
            raise AdapterError(f"{config.key_of('targets')}: {_why_not(model, target, name, known)}")
        wanted += found
    for left_out in config.exclude:
        if not any(has(path, left_out) for path in (*wanted, *unfit)):
            raise AdapterError(f"{config.key_of('exclude')}: " + unknown("target", left_out, known))
        wanted = [path for path in wanted if not has(path, left_out)]
    wanted = [path for path in wanted if not any(f"{path}.".startswith(f"{one}.") for one in whole)]
    for path in (path for path in wanted if path in unfit):
        raise AdapterError(f"{config.key_of('targets')}: {path} of {name} cannot be adapted: {unfit[path]}; exclude it")
    if not wanted:
        raise AdapterError(f"{config.key_of('targets')}: nothing of {name} is left to adapt")
    return _targets(wanted, linears, experts)


def default_targets(model: Any) -> tuple[list[str], dict[str, str]]:
    """The layers that `all-linear` adapts in a model, as far as PEFT knows their names; and the others, and why not."""
    linears = _linears(model)
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
        elif _last(path, 1) in mistaken:
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


def stored_targets(model: Any, stored: StoredAdapter, config: LoraConfig, name: str) -> Targets:
    """The weights that the adapter in `config.path` adapts. Raises AdapterError if the model lacks one of them."""
    linears, experts = _linears(model), _experts(model)
    parameters = stored.config.get("target_parameters") or []
    adapted = [one for one in experts if any(has(one, parameter) for parameter in parameters)]
    owners = {one.rpartition(".")[0] for one in adapted}
    modules = [one for one in stored.modules if one.removesuffix(".base_layer") not in owners]
    unfit = unfit_layers(model, linears, ())
    for one in modules:
        if one not in linears:
            raise AdapterError(f"{config.key_of('path')}: {config.path} adapts {one}, which {name} does not have")
        if one in unfit:
            raise AdapterError(f"{config.key_of('path')}: {config.path} adapts {one}, but {unfit[one]}")
    return _targets([*modules, *adapted], linears, experts)


def _targets(wanted: Sequence[str], linears: Sequence[str], experts: Sequence[str]) -> Targets:
    modules = [path for path in linears if path in wanted]
    parameters = [path for path in experts if path in wanted]
    return Targets(modules, parameters, _shortest(modules, linears, 1), _shortest(parameters, experts, 2))


def _shortest(chosen: Sequence[str], there: Iterable[str], parts: int) -> list[str]:
    """The last `parts` of the names if these select the same weights; otherwise full names."""
    last = {_last(path, parts) for path in chosen}
    named = {path for path in there if _last(path, parts) in last}
    numbers = any(_last(name, 1).isdigit() for name in last)  # of a list, as whole blocks have them too
    return sorted(last) if named == set(chosen) and not numbers else list(chosen)


def _linears(model: Any) -> list[str]:
    """All but the head, whose logits are computed from its weight (see `logprobs`), routers and indexers.

    A router is named so, or its class is (Llama 4's returns two tensors); an indexer (`attention.indexed`) gets no
    gradient.
    """
    head = model.get_output_embeddings()
    linears = [path for path, one in model.named_modules() if isinstance(one, nn.Linear | Conv1D) and one is not head]
    routers = {path for path in linears if type(model.get_submodule(path)).__name__.endswith("Router")}
    routers |= {path for path in linears if _last(path, 1) == "router"}
    return [path for path in linears if path not in routers and ".indexer." not in path]


def _experts(model: nn.Module) -> list[str]:
    return [
        path
        for path, weight in model.named_parameters()
        if weight.dim() == 3 and _last(path, 1) not in ("weight", "bias")
    ]


def _why_not(model: Any, target: str, name: str, known: list[str]) -> str:
    kept = [one for one in (model.get_input_embeddings(), model.get_output_embeddings()) if one is not None]
    if any(module in kept and has(path, target) for path, module in model.named_modules()):
        return f"{target} is not adapted: log-probs are computed from the head's own weights, which may be shared"
    return unknown(f"layer of {name}", target, known)


def _last(path: str, parts: int) -> str:
    return ".".join(path.split(".")[-parts:])
