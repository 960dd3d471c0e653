"""PEFT's layers around a transformers model: their settings, where they go, and how a new one begins.

    empty or loaded model --attach--> PEFT's layers, without values --hide--> the model's weights have their own names
                                                                    --show--> the layers are back

PEFT makes the layers, their first values and their tensor-parallel halves.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraLayer, LoraModel
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import ParamWrapper
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hone.engines.lora.adapter_files import AdapterError, StoredAdapter
from hone.engines.lora.merging import AdapterLayout
from hone.engines.lora.targets import WHOLE, Split, Targets, find_targets, stored_targets
from hone.engines.lora.whole_modules import SCORE_MODULE, Whole, check_mesh, file_names, find_whole, wrap
from hone.engines.settings import LoraConfig
from hone.models.numerics.precision import plain_name
from hone.models.settings import FourBitConfig

TRAINED, INITIAL = "default", "initial"  # PEFT's names of the two adapters
_FROM_WEIGHTS = ("pissa", "olora")
_INIT: dict[str, Any] = {"default": True}  # PEFT's name of an initialisation, where it differs from ours
_EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")  # PEFT wants all names of a fused weight
_SPLIT = ("colwise", "rowwise")  # tensor-parallel styles that PEFT supports


@dataclass(frozen=True, slots=True)
class Layer:
    """One adapted weight."""

    path: str  # of PEFT's layer
    module: Any
    weight: str  # the base weight's name in the state dict
    shape: AdapterLayout

    def tensor(self, adapter: str, part: str) -> str:
        return f"{self.path}.{part}.{adapter}.weight"


class AdapterLayers:
    """The layers of one adapter, and the modules that are trained whole."""

    def __init__(self, config: LoraConfig, stored: StoredAdapter | None, dtype: torch.dtype) -> None:
        """The adapter's tensors get `dtype`. Raises AdapterError for settings that do not fit."""
        self._config = config
        self._stored = stored
        self._dtype = dtype
        self._hidden: list[tuple[nn.Module, str, nn.Module]] = []
        self.peft = _peft_config(config, stored)
        self.found: list[Layer] = []
        self.whole: list[Whole] = []
        self.begins_from_weights = stored is None and config.init in _FROM_WEIGHTS
        """True if a second, frozen adapter holds what the initialisation takes out of the weights."""

    def attach(self, model: Any, name: str, split: Split | None = None) -> None:
        """Put PEFT's layers, without values, around the target layers of a transformers model; freeze the rest.

        Raises AdapterError, which calls the model `name`, for a target that does not exist or cannot be adapted.
        """
        config, key = self._config, self._config.key_of
        whole = find_whole(model, self._modules_to_save, name, key("modules_to_save"))
        tensor = split is not None and split.tensor is not None
        if split is not None:
            check_mesh(whole, key("modules_to_save"), split.key)
        if self._stored is None:
            targets = find_targets(model, config, name, whole, mistaken_names(model))
        else:
            targets = stored_targets(model, self._stored, config, name)
        if split is not None and tensor and config.quantise is not None:
            raise AdapterError(
                f"{key('quantise')}: {split.key}.tensor cannot cut layers in 4 bits; leave it at 1 and use shard, "
                "replicate or sequence"
            )
        if targets.short_experts:
            self._check_experts(targets.short_experts[0], split)
        gathered = self._stamp(model, targets.modules, split) if split is not None and tensor else []
        self.peft.target_modules = set(targets.short_modules)
        self.peft.target_parameters = targets.short_experts or None
        self.peft.fan_in_fan_out = any(isinstance(model.get_submodule(path), Conv1D) for path in targets.modules)
        model.requires_grad_(False)
        with _seen_whole(gathered), warnings.catch_warnings():  # `_check_found` says it with what to do
            warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
            tuner = LoraModel(model, self.peft, TRAINED, low_cpu_mem_usage=True)
            if self.begins_from_weights:
                tuner.peft_config[INITIAL] = self.peft
                tuner.inject_adapter(model, INITIAL, low_cpu_mem_usage=True)
        self.found = list(_found_layers(model))
        self._check_found(targets, name)
        for layer in self.found:
            self._prepare(layer.module)
        self.peft.modules_to_save = file_names(model, whole) or None  # not earlier: PEFT would wrap them too
        self.whole = wrap(model, whole, TRAINED, self._dtype)

    @property
    def _modules_to_save(self) -> tuple[str, ...]:
        if self._stored is None:
            return self._config.modules_to_save
        return tuple(self._stored.config.get("modules_to_save") or ())

    @property
    def four_bit(self) -> FourBitConfig | None:
        """Return the quantisation of frozen layers, or None. Layers in modules that are trained whole have none."""
        held = self._config.quantise
        whole = [name for name in self._modules_to_save if name != SCORE_MODULE]
        return held and held.model_copy(update={"skip": (*held.skip, *whole)})

    def _check_experts(self, weight: str, split: Split | None) -> None:
        key = self._config.key_of("targets")
        if split is not None:
            raise AdapterError(
                f"{key}: {weight} is a weight of all experts, which can be adapted only with {split.key}.expert and "
                f"{split.key}.tensor at 1; use {split.key}.shard, or target other layers"
            )
        if self.peft.use_dora or self._config.dropout or self._config.init not in ("default", "gaussian"):
            raise AdapterError(
                f"{key}: {weight} is a weight of all experts, which takes no dora, no dropout and no init but default "
                "and gaussian"
            )

    def _check_found(self, targets: Targets, name: str) -> None:
        """Raise AdapterError if PEFT adapted other layers: for some mixtures it takes an MLP's names for experts."""
        wanted = {*(f"{path}.weight" for path in targets.modules), *targets.experts}
        missing = sorted(wanted - {plain_name(layer.weight) for layer in self.found})
        if missing:
            raise AdapterError(
                f"{self._config.key_of('targets')}: PEFT {peft.__version__} takes gate_proj, up_proj and down_proj of "
                f"{name} for its experts, and would not adapt {missing[0]}; set "
                f"{self._config.key_of('exclude')}=[gate_proj, up_proj, down_proj]"
            )

    def _stamp(self, model: Any, modules: Iterable[str], split: Split) -> list[nn.Module]:
        """Tell PEFT which of the layers tensor parallelism has cut, and how; return those whose adapter stays whole."""
        gathered = []
        for path in modules:
            style = split.styles.get(".".join("*" if part.isdigit() else part for part in path.split(".")))
            if style is None:
                continue
            if style not in (*_SPLIT, *WHOLE):
                raise AdapterError(
                    f"{self._config.key_of('targets')}: {split.key}.tensor cuts {path} in a way ({style}) that PEFT "
                    f"does not support; exclude it, or leave {split.key}.tensor at 1"
                )
            if self.peft.use_dora:
                raise AdapterError(
                    f"{self._config.key_of('dora')}: DoRA needs the norms of whole rows of {path}, and "
                    f"{split.key}.tensor cuts it; leave that at 1, or dora off"
                )
            layer = model.get_submodule(path)
            if style in WHOLE:
                gathered.append(layer)
            else:
                layer._hf_tp_plan, layer._hf_device_mesh = style, split.tensor
        return gathered

    def _prepare(self, module: Any) -> None:
        for parts in (module.lora_A, module.lora_B, module.lora_magnitude_vector):
            parts.to(self._dtype)
        if self.begins_from_weights:
            module.set_adapter([TRAINED, INITIAL])
            module.scaling[INITIAL] = -module.scaling[TRAINED]
        for name, weight in module.named_parameters():
            weight.requires_grad_(".base_layer." not in f".{name}" and f".{TRAINED}." in f".{name}.")

    def hide(self, model: nn.Module) -> None:
        """Take the layers out of the model until `show`, so that its weights can be read under their own names."""
        for whole in self.whole:
            parent, _, child = whole.path.rpartition(".")
            owner = model.get_submodule(parent)
            self._hidden.append((owner, child, whole.module))
            setattr(owner, child, whole.module.base_layer)
        for layer in self.found:
            parent, _, child = layer.path.rpartition(".")
            if child != "base_layer":  # of experts: the outer one holds the inner one
                owner = model.get_submodule(parent)
                self._hidden.append((owner, child, layer.module))
                setattr(owner, child, layer.module.get_base_layer())

    def show(self) -> None:
        for owner, child, module in self._hidden:
            setattr(owner, child, module)
        self._hidden.clear()

    def switch(self, off: bool) -> None:
        """Compute with or without the adapter. PEFT's own switch changes `requires_grad`, which breaks FSDP2."""
        for whole in self.whole:
            whole.module.disabled = off
        for layer in self.found:
            layer.module._disable_adapters = off

    def tensors_of(self, layer: Layer) -> Iterator[tuple[str, str]]:
        """The adapter and the part of each tensor of a layer: ("default", "lora_A") ..."""
        for adapter in (TRAINED, INITIAL) if self.begins_from_weights else (TRAINED,):
            yield adapter, "lora_A"
            yield adapter, "lora_B"
        if self.peft.use_dora:
            yield TRAINED, "lora_magnitude_vector"

    def made_by_peft(self, layer: Layer, weight: Tensor | None, shape: torch.Size) -> Any:
        """PEFT's layer with its first values, around a copy of the whole weight or an empty one of its shape."""
        turned = layer.shape.turned
        out, into = reversed(shape) if turned else shape
        if self.begins_from_weights and self.peft.r > min(out, into):
            raise AdapterError(
                f"{self._config.key_of('rank')} = {self.peft.r} is more than {layer.weight} [{out}, {into}] has; "
                f"init {self._config.init} needs at most {min(out, into)}"
            )
        base = nn.Linear(into, out, bias=False, device="meta")
        held = torch.empty(out, into) if weight is None else (weight.T if turned else weight).float().cpu().clone()
        base.weight = nn.Parameter(held, requires_grad=False)
        word = _INIT.get(self._config.init, self._config.init)
        changes = {"init_lora_weights": word, "target_parameters": None, "fan_in_fan_out": False}
        config = peft.LoraConfig(**{**self.peft.to_dict(), **changes})
        return LoraLinear(base, TRAINED, config=config, r=self.peft.r, lora_alpha=self.peft.lora_alpha)


@contextmanager
def _seen_whole(layers: list[nn.Module]) -> Iterator[None]:
    """Make the cut weights of these layers look whole to PEFT, which gives its matrices the size of a rank's part."""
    before = [layer.get_parameter("weight") for layer in layers]
    for layer, weight in zip(layers, before, strict=True):
        layer.weight = nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype, device="meta"), requires_grad=False)
    try:
        yield
    finally:
        for layer, weight in zip(layers, before, strict=True):
            layer.weight = weight


def mistaken_names(model: Any) -> frozenset[str]:
    """Names of linear layers that PEFT takes for experts in this mixture, where it would not adapt the layers."""
    names = {path.rpartition(".")[2] for path, one in model.named_modules() if isinstance(one, nn.Linear)}
    asked = peft.LoraConfig(target_modules=[*names, *_EXPERTS])
    convert_peft_config_for_transformers(asked, model, None)
    return frozenset(names - set(asked.target_modules or ()))


def _peft_config(config: LoraConfig, stored: StoredAdapter | None) -> Any:
    rank, alpha, dora, rslora = config.rank, config.alpha, config.dora, config.rslora
    if stored is not None:
        theirs = stored.config
        rank, alpha = theirs["r"], theirs["lora_alpha"]
        dora, rslora = theirs.get("use_dora", False), theirs.get("use_rslora", False)
        for key, value in (("rank", rank), ("alpha", alpha), ("dora", dora), ("rslora", rslora)):
            if key in config.model_fields_set and getattr(config, key) != value:
                raise AdapterError(
                    f"{config.key_of(key)}: the adapter in {config.path} has {key}={value}; leave the key out"
                )
        for key in ("targets", "exclude", "init", "modules_to_save"):
            if key in config.model_fields_set and getattr(config, key) != LoraConfig.model_fields[key].default:
                raise AdapterError(
                    f"{config.key_of(key)}: the adapter in {config.key_of('path')} decides; leave the key out"
                )
    elif config.init in _FROM_WEIGHTS and dora:
        raise AdapterError(
            f"{config.key_of('init')}={config.init} cannot be combined with {config.key_of('dora')}=true: "
            f"{config.init} changes the base weights whose norms DoRA learns; remove one of them"
        )
    if config.init == "orthogonal" and rank % 2:
        raise AdapterError(f"{config.key_of('init')}: orthogonal needs an even rank, found {rank}")
    return peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]
        lora_dropout=config.dropout,
        use_dora=dora,
        use_rslora=rslora,
        init_lora_weights=False,  # the adapter sets first values, the same on every mesh
        bias="none",
    )


def _found_layers(model: nn.Module) -> Iterator[Layer]:
    for path, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        depth, inner = 1, module.base_layer
        while isinstance(inner, LoraLayer):
            depth, inner = depth + 1, inner.base_layer
        name, shape = "weight", AdapterLayout(turned=isinstance(inner, Conv1D))
        if isinstance(module, ParamWrapper):
            name, shape = module.parameter_name, AdapterLayout(not module._did_swap_in_out_features, module.num_experts)
        yield Layer(path, module, f"{path}{'.base_layer' * depth}.{name}", shape)
