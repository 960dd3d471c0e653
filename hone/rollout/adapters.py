"""LoRA adapters in PEFT's format: how an engine reads their tensors and merges them into its weights.

    tensors, config --read_adapter--> a Delta for each weight, all checked
    base W (kept aside) --W + scaling * B A--> merged weights        LoRA (arXiv 2106.09685); rsLoRA (2312.03732)
                        --m * (W + scaling * B A) / |W + scaling * B A|-->                    DoRA (2402.09353)

Tensors come under the names of PEFT's files, with PEFT's `adapter_config.json`. An adapter of another
kind, a tensor that belongs to no weight and a matrix without its partner are errors.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hone.config import ConfigError
from hone.registry import unknown

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
BROUGHT = "(a weight sync)"  # in the place of an adapter's folder, where a server has been sent its tensors

PREFIX = "base_model.model."
PARTS = {
    "lora_A.weight": "a",
    "lora_B.weight": "b",
    "lora_embedding_A": "a",
    "lora_embedding_B": "b",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
}
OTHER_KINDS = (  # entries of PEFT's configuration that change what the matrices mean, when they say anything
    "alora_invocation_tokens",
    "arrow_config",
    "layer_replication",
    "lora_bias",
    "use_bdlora",
    "use_qalora",
    "target_parameters",
    "trainable_token_indices",
)


@dataclass(frozen=True, slots=True)
class AdapterKind:
    """The properties that decide whether an engine can load an adapter; known before the first one is trained."""

    rank: int  # the largest of its matrices
    dora: bool = False
    experts: bool = False  # on weights of all experts together (PEFT: target_parameters)
    whole_modules: bool = False  # with modules that are trained whole (PEFT: modules_to_save)
    model: str = ""  # transformers' `model_type` of what it is on
    modules: frozenset[str] = frozenset()  # last parts of the names of the layers that it is on; empty: not known

    @classmethod
    def of(cls, config: Mapping[str, Any], model: str) -> AdapterKind:
        """From PEFT's configuration."""
        targets = config.get("target_modules") or ()
        listed = () if isinstance(targets, str) else targets  # else a pattern, or a word for many
        return cls(
            rank=max([int(config["r"]), *(config.get("rank_pattern") or {}).values()]),
            dora=bool(config.get("use_dora")),
            experts=bool(config.get("target_parameters")),
            whole_modules=bool(config.get("modules_to_save")),
            model=model,
            modules=frozenset(name.rpartition(".")[2] for name in listed),
        )


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """A folder with an adapter, as PEFT writes it."""

    folder: Path
    config: Mapping[str, Any]

    @classmethod
    def at(cls, folder: str) -> AdapterFiles:
        """Raises ConfigError, naming the file, for a folder that is none, or an adapter of another kind."""
        place = Path(folder).expanduser().absolute()
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if not (place / name).is_file():
                raise ConfigError(f"{folder} is no adapter in PEFT's format: it has no {name}")
        try:
            config = json.loads((place / CONFIG_FILE).read_text(encoding="utf-8"))
            refuse_other_kinds(config)
        except (json.JSONDecodeError, AttributeError, ValueError) as error:
            raise ConfigError(f"{place / CONFIG_FILE}: {error}") from error
        return cls(place, config)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor under its PEFT name."""
        try:
            return load_file(self.folder / WEIGHTS_FILE)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{self.folder / WEIGHTS_FILE} cannot be read: {error}") from error


def unfit_for_merging(kind: AdapterKind) -> str:
    """Why `MergedAdapter` cannot take an adapter of a kind; empty: it can."""
    return "it is on the weights of experts" if kind.experts else ""


def check_adapter(name: str, known: Collection[str]) -> None:
    """Raise ValueError for an adapter that is not served."""
    if name not in known:
        raise ValueError(unknown("adapter", name, list(known)) if known else f"no adapter {name!r} is served here")


@dataclass(slots=True)
class Delta:
    """The change of one weight by an adapter."""

    scaling: float
    transposed: bool  # the weight is stored [in, out]
    parts: dict[str, Tensor] = field(default_factory=dict)  # a [r, in], b [out, r], and of DoRA magnitude [out]

    def merged(self, base: Tensor) -> Tensor:
        """`base` with the adapter, computed in float32 at least, in the dtype of `base`."""
        wide = torch.promote_types(base.dtype, torch.float32)
        a, b = (self.parts[name].to(base.device, wide) for name in "ab")  # adapters from a file are in host memory
        weight = base.to(wide).T if self.transposed else base.to(wide)  # [out, in]
        weight = weight + self.scaling * (b @ a)
        if "magnitude" in self.parts:
            norm = torch.linalg.norm(weight, dim=1)
            weight = (self.parts["magnitude"].to(base.device, wide).flatten() / norm)[:, None] * weight
        return (weight.T if self.transposed else weight).to(base.dtype)


class MergedAdapter:
    """Merges one adapter at a time into weights, in place, and keeps a copy of the base of each changed weight."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        """`weights`: the engine's weights under Hugging Face names, which are changed in place."""
        self._weights = weights
        self._base: dict[str, Tensor] = {}

    def put(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        """Merge an adapter. Raises ValueError, with nothing changed, if it does not fit the weights."""
        shapes = {name: tuple(weight.shape) for name, weight in self._weights.items()}
        deltas, whole = read_adapter(tensors, config, shapes)
        touched = deltas.keys() | whole.keys()
        self._refuse_tied(touched)
        for name in self._base.keys() - touched:  # the last adapter was on it, this one is not
            self._weights[name].copy_(self._base.pop(name))
        for name in touched - self._base.keys():
            self._base[name] = self._weights[name].clone()
        for name, delta in deltas.items():
            self._weights[name].copy_(delta.merged(self._base[name]))
        for name, tensor in whole.items():
            self._weights[name].copy_(tensor)

    def take_out(self) -> None:
        """Restore the base."""
        for name, tensor in self._base.items():
            self._weights[name].copy_(tensor)
        self._base.clear()

    def _refuse_tied(self, touched: Any) -> None:
        """Refuse an adapter on a weight that shares its storage with another name: it would change both."""
        owners: dict[int, str] = {}
        for name, tensor in self._weights.items():
            owner = owners.setdefault(tensor.data_ptr(), name)
            if owner != name and (owner in touched) != (name in touched):
                raise ValueError(
                    f"the adapter is on one of {owner!r} and {name!r}, which are one tensor in this model: send merged "
                    "weights of a model whose head is untied"
                )


def read_adapter(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Delta], dict[str, Tensor]]:
    """Read an adapter: the delta of each weight, and the weights that it replaces, by the names of the weights.

    `shapes` has the shape of each of the model's weights. Raises ValueError for an adapter that does not fit them.
    """
    refuse_other_kinds(config)
    deltas: dict[str, Delta] = {}
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, part = _split(name)
        weight = module if part is None else f"{module}.weight"
        if weight not in shapes:
            raise ValueError(f"the adapter's {name!r} belongs to no weight of the model: there is no {weight!r}")
        if part is None:
            whole[weight] = tensor
            continue
        if weight not in deltas:
            embedding = "lora_embedding" in name or f"{PREFIX}{module}.lora_embedding_A" in tensors
            transposed = embedding or bool(config.get("fan_in_fan_out"))
            deltas[weight] = Delta(_scaling(config, module), transposed)
        deltas[weight].parts[part] = tensor
    if not deltas:
        raise ValueError("the adapter has no LoRA matrix: it would change nothing")
    for weight, delta in deltas.items():
        _check(weight, delta, tuple(shapes[weight]), bool(config.get("use_dora")))
    for weight, tensor in whole.items():
        if tuple(tensor.shape) != tuple(shapes[weight]):
            raise ValueError(
                f"the adapter's {weight!r} has shape {tuple(tensor.shape)}, the model's {tuple(shapes[weight])}"
            )
    return deltas, whole


def _check(weight: str, delta: Delta, shape: tuple[int, ...], dora: bool) -> None:
    wanted = {"a", "b", "magnitude"} if dora else {"a", "b"}
    if delta.parts.keys() != wanted:
        raise ValueError(
            f"the adapter of {weight!r} has {', '.join(sorted(delta.parts))}; expected {', '.join(sorted(wanted))}"
        )
    found = (delta.parts["b"].shape[0], delta.parts["a"].shape[-1])
    fits = delta.parts["a"].dim() == delta.parts["b"].dim() == 2 and len(shape) == 2
    if not fits or found != (shape[::-1] if delta.transposed else shape):
        raise ValueError(f"the adapter of {weight!r} is for a matrix of {found}, the model's has {shape}")
    if delta.parts["a"].shape[0] != delta.parts["b"].shape[1]:
        raise ValueError(f"the two matrices of the adapter of {weight!r} are of unlike rank")
    if dora and delta.parts["magnitude"].numel() != found[0]:
        raise ValueError(f"the adapter of {weight!r} has {delta.parts['magnitude'].numel()} magnitudes, not {found[0]}")


def refuse_other_kinds(config: Mapping[str, Any]) -> None:
    """Raise ValueError for an adapter that is not plain LoRA, rsLoRA or DoRA, naming the entry that says so."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"the adapter is of the kind {kind!r}; expected LORA")
    for entry in OTHER_KINDS:
        if config.get(entry):
            raise ValueError(f"the adapter has {entry} = {config[entry]!r}, which changes what its matrices mean")
    if config.get("bias", "none") != "none":
        raise ValueError(f"the adapter has bias = {config['bias']!r}; expected 'none'")


def _split(name: str) -> tuple[str, str | None]:
    """The module that an adapter's tensor belongs to, and which part of the adapter it is; None: a whole weight."""
    if not name.startswith(PREFIX):
        raise ValueError(f"the adapter's {name!r} is not named as PEFT does: it should begin with {PREFIX!r}")
    plain = name.removeprefix(PREFIX)
    for ending, part in PARTS.items():
        if plain.endswith(f".{ending}"):
            return plain.removesuffix(f".{ending}"), part
    if "lora_" in plain:
        raise ValueError(f"the adapter's {name!r} is of no kind that is known ({', '.join(PARTS)})")
    return plain, None


def _scaling(config: Mapping[str, Any], module: str) -> float:
    """Factor of B A: alpha / r, or alpha / sqrt(r) for rsLoRA; rank and alpha patterns are matched as in PEFT."""
    rank = _of_pattern(config.get("rank_pattern"), module, config["r"])
    alpha = _of_pattern(config.get("alpha_pattern"), module, config["lora_alpha"])
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _of_pattern(pattern: Mapping[str, float] | None, module: str, default: float) -> float:
    """The value of the first key that is the end of the module's name, at a dot."""
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


__all__ = [
    "BROUGHT",
    "PREFIX",
    "AdapterFiles",
    "AdapterKind",
    "Delta",
    "MergedAdapter",
    "check_adapter",
    "read_adapter",
    "refuse_other_kinds",
    "unfit_for_merging",
]
