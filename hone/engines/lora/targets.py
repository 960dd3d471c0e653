"""Targets of adapters: linear layers and, in a mixture, the weights of all experts."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from hone.engines.lora.adapter_files import AdapterError, StoredAdapter
from hone.engines.settings import LoraConfig
from hone.models.adaptable import last_names, linear_layers, unfit_layers
from hone.models.four_bit import has
from hone.registry import unknown

WHOLE = ("colwise_gather_output", "rowwise_split_input")
"""Tensor-parallel styles of matrices that are cut, and whose inputs and results are whole on every rank."""


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
    linears, experts = linear_layers(model), _experts(model)
    unfit = unfit_layers(model, linears, mistaken)
    known = sorted({last_names(path, 1) for path in linears} | {last_names(path, 2) for path in experts})
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
    return _targets(model, wanted, linears, experts)


def stored_targets(model: Any, stored: StoredAdapter, config: LoraConfig, name: str) -> Targets:
    """The weights that the adapter in `config.path` adapts. Raises AdapterError if the model lacks one of them."""
    linears, experts = linear_layers(model), _experts(model)
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
    return _targets(model, [*modules, *adapted], linears, experts)


def _targets(model: nn.Module, wanted: Sequence[str], linears: Sequence[str], experts: Sequence[str]) -> Targets:
    modules = [path for path in linears if path in wanted]
    parameters = [path for path in experts if path in wanted]
    there = [path for path, _ in model.named_modules()]  # PEFT would adapt every module with such a name
    return Targets(modules, parameters, _shortest(modules, there, 1), _shortest(parameters, experts, 2))


def _shortest(chosen: Sequence[str], there: Iterable[str], parts: int) -> list[str]:
    """The last `parts` of the names if these select the same weights; otherwise full names."""
    last = {last_names(path, parts) for path in chosen}
    named = {path for path in there if last_names(path, parts) in last}
    numbers = any(last_names(name, 1).isdigit() for name in last)  # of a list, as whole blocks have them too
    return sorted(last) if named == set(chosen) and not numbers else list(chosen)


def _experts(model: nn.Module) -> list[str]:
    return [
        path
        for path, weight in model.named_parameters()
        if weight.dim() == 3 and last_names(path, 1) not in ("weight", "bias")
    ]


def _why_not(model: Any, target: str, name: str, known: list[str]) -> str:
    kept = [one for one in (model.get_input_embeddings(), model.get_output_embeddings()) if one is not None]
    if any(module in kept and has(path, target) for path, module in model.named_modules()):
        return f"{target} is not adapted: log-probs are computed from the head's own weights, which may be shared"
    return unknown(f"layer of {name}", target, known)
