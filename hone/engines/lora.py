"""LoRA by PEFT: a low-rank adapter is trained beside frozen weights, in one process and on every mesh.

    y = W x + scale * B (A x)        W [out, in] frozen, in compute precision; A [rank, in], B [out, rank] trained

    empty or loaded model --attach--> PEFT's layers, empty --fully_shard--> --hide--> weights are read under their own
                                                                                      names --show, fill--> trained

PEFT makes the layers, their first values and their tensor-parallel halves; `fully_shard` holds their shards like those
of any weight. The base is never changed: an initialisation that takes a part out of the weights (PiSSA, OLoRA) is kept
as a second, frozen adapter with the scale's sign turned, so that "without the adapter" is the base to the bit.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraLayer, LoraModel
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from hone.engines.adapter_files import KEY, PREFIX, AdapterError, read_adapter
from hone.engines.merging import Shape, merge
from hone.engines.settings import LoraConfig
from hone.engines.shards import Shard, TensorSplit
from hone.engines.targets import find_targets, stored_targets
from hone.engines.whole_modules import SCORE_MODULE, Whole, check_mesh, file_names, find_whole, wrap
from hone.models.loading import ValueModel
from hone.models.settings import FourBitConfig, ModelConfig

TRAINED, INITIAL = "default", "initial"  # PEFT's names of the two adapters
_FROM_WEIGHTS = ("pissa", "olora")
_INIT: dict[str, Any] = {"default": True}  # PEFT's word for our word, where it is another
_SPLIT = ("colwise", "rowwise")  # tensor-parallel styles that PEFT knows

GatherFn = Callable[[str, Tensor], Tensor]
"""A weight's name and what this rank holds of it -> the whole weight."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """One adapted weight."""

    path: str  # of PEFT's layer
    module: Any
    weight: str  # the base weight's name in the state dict
    shape: Shape

    def tensor(self, adapter: str, part: str) -> str:
        return f"{self.path}.{part}.{adapter}.weight"


class Adapter:
    """The LoRA adapter of one model."""

    def __init__(self, config: LoraConfig, model: ModelConfig, dtype: torch.dtype) -> None:
        """`dtype` is that in which the optimizer updates it. Raises AdapterError for settings that do not fit."""
        self._config = config
        self._model = model
        self._dtype = dtype
        self._stored = read_adapter(config.path) if config.path else None
        self._prefix = ""
        self._disabled = False
        self._layers: list[_Layer] = []
        self._whole: list[Whole] = []
        self._owners: dict[str, str] = {}  # of whole modules' tensors: the name under which a tied one is kept
        self._hidden: list[tuple[nn.Module, str, nn.Module]] = []
        self._peft = self._peft_config()

    def _peft_config(self) -> Any:
        config = self._config
        rank, alpha, dora, rslora = config.rank, config.alpha, config.dora, config.rslora
        if self._stored is not None:
            theirs = self._stored.config
            rank, alpha = theirs["r"], theirs["lora_alpha"]
            dora, rslora = theirs.get("use_dora", False), theirs.get("use_rslora", False)
            for key, value in (("rank", rank), ("alpha", alpha), ("dora", dora), ("rslora", rslora)):
                if key in config.model_fields_set and getattr(config, key) != value:
                    raise AdapterError(
                        f"{KEY}: {config.path} has {key}={value}, this run asks for another; leave it unset"
                    )
            for key in ("targets", "exclude", "init", "modules_to_save"):
                if key in config.model_fields_set and getattr(config, key) != LoraConfig.model_fields[key].default:
                    raise AdapterError(f"engine.lora.{key}: the adapter in engine.lora.path decides; leave it unset")
        elif config.init in _FROM_WEIGHTS and dora:
            raise AdapterError(f"engine.lora.init: {config.init} takes a part out of the weights, dora their length")
        if config.init == "orthogonal" and rank % 2:
            raise AdapterError(f"engine.lora.init: orthogonal needs an even rank, found {rank}")
        return peft.LoraConfig(
            r=rank,
            lora_alpha=alpha,  # type: ignore[arg-type]
            lora_dropout=config.dropout,
            use_dora=dora,
            use_rslora=rslora,
            init_lora_weights=False,  # `fill` does it, alike on every mesh
            bias="none",
        )

    # -------------------------------------------------------------------------------------------------------- layers

    def attach(self, model: Any, name: str, split: TensorSplit | None = None, experts_cut: bool = False) -> None:
        """Put PEFT's layers, still without values, around the target layers of a transformers model; freeze the rest.

        `name` is for errors. Raises AdapterError for a target that is not there or cannot be adapted on this mesh.
        """
        whole = find_whole(model, self._modules_to_save, name)
        check_mesh(whole, split, experts_cut)
        if self._stored is None:
            targets = find_targets(model, self._config, name, whole)
        else:
            targets = stored_targets(model, self._stored, str(self._config.path), name)
        experts = targets.short_experts
        if split is not None and self._config.quantise is not None:
            raise AdapterError(
                "engine.lora.quantise: each rank holds the layers in 4 bits whole, and parallel.tensor would cut them; "
                "leave it at 1 and use parallel.shard, replicate or sequence"
            )
        if experts and (experts_cut or split is not None):
            raise AdapterError(
                f"engine.lora.targets: {experts[0]} is a weight of all experts, which is adapted with parallel.expert "
                "and parallel.tensor at 1 only; use parallel.shard, or target other layers"
            )
        if experts and (
            self._peft.use_dora or self._config.dropout or self._config.init not in ("default", "gaussian")
        ):
            raise AdapterError(
                f"engine.lora.targets: {experts[0]} is a weight of all experts, for which there is no dora, no dropout "
                "and no init but default and gaussian"
            )
        if split is not None:
            self._stamp(model, targets.modules, split)
        self._peft.target_modules = set(targets.short_modules)
        self._peft.target_parameters = experts or None
        self._peft.fan_in_fan_out = any(isinstance(model.get_submodule(path), Conv1D) for path in targets.modules)
        model.requires_grad_(False)
        tuner = LoraModel(model, self._peft, TRAINED, low_cpu_mem_usage=True)
        if self._begins_from_weights:
            tuner.peft_config[INITIAL] = self._peft
            tuner.inject_adapter(model, INITIAL, low_cpu_mem_usage=True)
        self._layers = list(_found_layers(model))
        for layer in self._layers:
            self._prepare_layer(layer.module)
        self._peft.modules_to_save = file_names(model, whole) or None  # not earlier: PEFT would wrap them too
        self._whole = wrap(model, whole, TRAINED, self._dtype)

    @property
    def _modules_to_save(self) -> tuple[str, ...]:
        if self._stored is None:
            return self._config.modules_to_save
        return tuple(self._stored.config.get("modules_to_save") or ())

    @property
    def four_bit(self) -> FourBitConfig | None:
        """How the frozen layers are held: those in modules that are trained whole stay as they are."""
        held = self._config.quantise
        whole = [name for name in self._modules_to_save if name != SCORE_MODULE]
        return held and held.model_copy(update={"skip": (*held.skip, *whole)})

    @property
    def _begins_from_weights(self) -> bool:
        return self._stored is None and self._config.init in _FROM_WEIGHTS

    def _prepare_layer(self, module: Any) -> None:
        for parts in (module.lora_A, module.lora_B, module.lora_magnitude_vector):
            parts.to(self._dtype)
        if self._begins_from_weights:
            module.set_adapter([TRAINED, INITIAL])
            module.scaling[INITIAL] = -module.scaling[TRAINED]
        for name, weight in module.named_parameters():
            weight.requires_grad_(".base_layer." not in f".{name}" and f".{TRAINED}." in f".{name}.")

    def _stamp(self, model: Any, modules: Iterable[str], split: TensorSplit) -> None:
        """Tell PEFT which of the layers are cut over the tensor ranks, and how."""
        for path in modules:
            style = split.styles.get(".".join("*" if part.isdigit() else part for part in path.split(".")))
            if style is None:
                continue
            if style not in _SPLIT:
                raise AdapterError(
                    f"engine.lora.targets: parallel.tensor cuts {path} in a way ({style}) that PEFT does not know; "
                    "exclude it, or leave parallel.tensor at 1"
                )
            if self._peft.use_dora:
                raise AdapterError(
                    f"engine.lora.dora: the row lengths of {path} are not to be had where parallel.tensor has cut it; "
                    "leave parallel.tensor at 1, or dora off"
                )
            layer = model.get_submodule(path)
            layer._hf_tp_plan, layer._hf_device_mesh = style, split.mesh

    # ----------------------------------------------------------------------------------------------- while it is read

    def hide(self, model: nn.Module) -> None:
        """Take PEFT's layers out of the model again, until `show`: its weights have their own names meanwhile."""
        for whole in self._whole:
            parent, _, child = whole.path.rpartition(".")
            owner = model.get_submodule(parent)
            self._hidden.append((owner, child, whole.module))
            setattr(owner, child, whole.module.base_layer)
        for layer in self._layers:
            parent, _, child = layer.path.rpartition(".")
            if child != "base_layer":  # of experts: the outer one holds the inner one
                owner = model.get_submodule(parent)
                self._hidden.append((owner, child, layer.module))
                setattr(owner, child, layer.module.get_base_layer())

    def show(self) -> None:
        for owner, child, module in self._hidden:
            setattr(owner, child, module)
        self._hidden.clear()

    def fill(self, root: nn.Module, prefix: str, device: str, whole: GatherFn, mesh: Any) -> None:
        """Give every tensor of the adapter its first value: the same on every mesh. Every rank calls this.

        `prefix` is the adapted model's name within `root` ("" or "body."), `whole` gathers a weight.
        """
        self._prefix = prefix
        for name, weight in root.named_parameters():
            if f".{TRAINED}." not in name and not name.startswith("score."):
                weight.requires_grad_(False)
        if self._stored is not None and self._stored.head and isinstance(root, ValueModel):
            root.load_state_dict(self._stored.head, strict=False)
        for layer in self._layers:
            base = layer.module.get_base_layer()
            weight = getattr(base, layer.weight.rpartition(".")[2])
            values = self._values(layer, weight, partial(whole, layer.weight, weight))
            for adapter, part in self._tensors_of(layer):
                holder = getattr(layer.module, part)[adapter]
                value = values[adapter, part]
                if value.shape != holder.weight.shape:
                    raise AdapterError(
                        f"{KEY}: {self._config.path}: {layer.tensor(adapter, part)} is {list(value.shape)}, here it is "
                        f"{list(holder.weight.shape)}"
                    )
                holder.weight = _placed(holder.weight, value.to(self._dtype), device, mesh, trained=adapter == TRAINED)
        self._fill_whole(device, whole, mesh)
        first: dict[int, str] = {}
        for name, weight in root.named_parameters(remove_duplicate=False):
            self._owners[name] = first.setdefault(id(weight), name)

    def _fill_whole(self, device: str, whole: GatherFn, mesh: Any) -> None:
        made: dict[int, nn.Parameter] = {}  # of a tied tensor there is one
        for one in self._whole:
            one.take_buffers(device)
            for name, empty, base in list(one.parameters()):
                if id(empty) not in made:
                    plain = f"{one.path}.{name}"
                    value = whole(plain, base) if self._stored is None else self._stored_value(plain, base.shape)
                    made[id(empty)] = _placed(empty, value.to(self._dtype), device, mesh, trained=True)
                one.place(name, made[id(empty)])

    def _stored_value(self, name: str, shape: torch.Size) -> Tensor:
        assert self._stored is not None
        found = self._stored.tensors.get(name)
        if found is None or found.shape != shape:
            there = "does not have it" if found is None else f"has it as {list(found.shape)}"
            raise AdapterError(f"{KEY}: {self._config.path} should have {name} as {list(shape)}, and {there}")
        return found

    def _tensors_of(self, layer: _Layer) -> Iterator[tuple[str, str]]:
        for adapter in (TRAINED, INITIAL) if self._begins_from_weights else (TRAINED,):
            yield adapter, "lora_A"
            yield adapter, "lora_B"
        if self._peft.use_dora:
            yield TRAINED, "lora_magnitude_vector"

    def _values(self, layer: _Layer, weight: Tensor, whole: Callable[[], Tensor]) -> dict[tuple[str, str], Tensor]:
        """First values by (adapter, part), whole, on the CPU."""
        if self._stored is not None:
            return self._stored_values(layer)
        digest = hashlib.blake2b(f"{self._config.seed} {layer.weight}".encode(), digest_size=4).digest()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int.from_bytes(digest, "big"))
            if layer.shape.experts:
                return self._expert_values(layer)
            needed = self._begins_from_weights or self._peft.use_dora
            made = self._made_by_peft(layer, whole() if needed else None, weight.shape)
        found = {(TRAINED, part): getattr(made, part)[TRAINED].weight.detach() for part in ("lora_A", "lora_B")}
        if self._begins_from_weights:
            found |= {(INITIAL, part): found[TRAINED, part].clone() for part in ("lora_A", "lora_B")}
        if self._peft.use_dora:
            found[TRAINED, "lora_magnitude_vector"] = made.lora_magnitude_vector[TRAINED].weight.detach()
        return found

    def _made_by_peft(self, layer: _Layer, weight: Tensor | None, shape: torch.Size) -> Any:
        """PEFT's own layer around a copy of the whole weight, or around room for one that it does not look at."""
        turned = layer.shape.turned
        out, into = reversed(shape) if turned else shape
        if self._begins_from_weights and self._peft.r > min(out, into):
            raise AdapterError(
                f"engine.lora.rank = {self._peft.r} is more than {layer.weight} [{out}, {into}] has; "
                f"init {self._config.init} needs at most {min(out, into)}"
            )
        base = nn.Linear(into, out, bias=False, device="meta")
        held = torch.empty(out, into) if weight is None else (weight.T if turned else weight).float().cpu().clone()
        base.weight = nn.Parameter(held, requires_grad=False)
        word = _INIT.get(self._config.init, self._config.init)
        changes = {"init_lora_weights": word, "target_parameters": None, "fan_in_fan_out": False}
        config = peft.LoraConfig(**{**self._peft.to_dict(), **changes})
        return LoraLinear(base, TRAINED, config=config, r=self._peft.r, lora_alpha=self._peft.lora_alpha)

    def _expert_values(self, layer: _Layer) -> dict[tuple[str, str], Tensor]:
        a, b = (getattr(layer.module, part)[TRAINED].weight.shape for part in ("lora_A", "lora_B"))
        first = torch.empty(a)
        if self._config.init == "gaussian":
            nn.init.normal_(first, std=1 / self._peft.r)
        else:
            nn.init.kaiming_uniform_(first, a=math.sqrt(5))
        return {(TRAINED, "lora_A"): first, (TRAINED, "lora_B"): torch.zeros(b)}

    def _stored_values(self, layer: _Layer) -> dict[tuple[str, str], Tensor]:
        assert self._stored is not None
        found = {}
        for adapter, part in self._tensors_of(layer):
            name = _file_name(layer.tensor(adapter, part))
            if name not in self._stored.tensors:
                raise AdapterError(f"{KEY}: {self._config.path} lacks {name}")
            found[adapter, part] = self._stored.tensors[name]
        return found

    # ------------------------------------------------------------------------------------------------------- in use

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """The base alone. PEFT's own switch would also turn gradients off and on, under the feet of `fully_shard`."""
        before = self._disabled
        self._switch(off=True)
        try:
            yield
        finally:
            self._switch(off=before)

    def _switch(self, off: bool) -> None:
        self._disabled = off
        for whole in self._whole:
            whole.module.disabled = off
        for layer in self._layers:
            layer.module._disable_adapters = off

    @contextmanager
    def dropping(self, device: str, *numbers: int) -> Iterator[None]:
        """Dropout that depends on `numbers` (step, micro-batch, data rank) and the seed, and on nothing else."""
        if not self._config.dropout:
            yield
            return
        kind = torch.device(device).type
        own = [] if kind == "cpu" else [getattr(torch, kind).current_device()]
        with torch.random.fork_rng(own, device_type=kind if own else "cuda"):
            digest = hashlib.blake2b(repr((self._config.seed, numbers)).encode(), digest_size=4).digest()
            torch.manual_seed(int.from_bytes(digest, "big"))
            yield

    @property
    def names(self) -> set[str]:
        """The adapter's tensors, as the model's state dict names them."""
        of_layers = {
            self._prefix + layer.tensor(adapter, part)
            for layer in self._layers
            for adapter, part in self._tensors_of(layer)
        }
        return of_layers | {owner for _, _, owner in self._whole_tensors()}

    def _whole_tensors(self) -> Iterator[tuple[str, str, str]]:
        """Of each tensor of a module that is trained whole: its plain name, its own, and that under which it is kept.

        The first is within the adapted model, the others are of the state dict.
        """
        for one in self._whole:
            for name, _, _ in one.parameters():
                mine = self._prefix + one.tensor(name)
                yield f"{one.path}.{name}", mine, self._owners[mine]

    # ---------------------------------------------------------------------------------------------------- on its way

    def merged(
        self, weights: Iterable[tuple[str, Tensor]], adapter: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """The base's weights under their own names, with what the adapter (whole, by name) adds, in its precision.

        Nothing is added while it is disabled.
        """
        layers = {} if self._disabled else {self._prefix + layer.weight: layer for layer in self._layers}
        trained = {self._prefix + plain: owner for plain, _, owner in self._whole_tensors()}
        names = self.names | {mine for _, mine, _ in self._whole_tensors()}
        for name, weight in weights:
            if name in names:
                continue
            plain = name.replace(".base_layer.", ".").replace(".base_layer.", ".")
            if name in layers:
                yield plain, self._merge(layers[name], weight, adapter)
            elif plain in trained and not self._disabled:
                yield plain, adapter[trained[plain]].to(weight.device, copy=True)
            else:
                yield plain, weight

    def _merge(self, layer: _Layer, weight: Tensor, adapter: Mapping[str, Tensor]) -> Tensor:
        def tensor(one: str, part: str) -> Tensor:
            return adapter[self._prefix + layer.tensor(one, part)].to(weight.device, self._dtype)

        adapters = dict.fromkeys(one for one, _ in self._tensors_of(layer))
        terms = [(layer.module.scaling[one], tensor(one, "lora_A"), tensor(one, "lora_B")) for one in adapters]
        lengths = tensor(TRAINED, "lora_magnitude_vector") if self._peft.use_dora else None
        return merge(weight.to(self._dtype), terms, layer.shape, lengths)

    def file_tensors(self, adapter: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The adapter under the names of PEFT's files; what was begun from the weights as one of twice the rank."""
        for layer in self._layers:
            for one, part in self._tensors_of(layer):
                if one == INITIAL:
                    continue
                tensor = adapter[self._prefix + layer.tensor(one, part)]
                if self._begins_from_weights:
                    first = adapter[self._prefix + layer.tensor(INITIAL, part)]
                    tensor = torch.cat([tensor, first]) if part == "lora_A" else torch.cat([tensor, -first], 1)
                yield PREFIX + _file_name(layer.tensor(one, part)), tensor
        for plain, _, owner in self._whole_tensors():
            yield PREFIX + plain, adapter[owner].clone()

    def file_config(self) -> dict[str, Any]:
        """What PEFT's `adapter_config.json` says, as JSON values."""
        doubled = 2 if self._begins_from_weights else 1
        scale = math.sqrt(doubled) if self._peft.use_rslora else doubled
        changes = {
            "r": self._peft.r * doubled,
            "lora_alpha": self._peft.lora_alpha * scale,
            "init_lora_weights": True,
            "inference_mode": True,
            "base_model_name_or_path": _where(self._model.path),
            "revision": self._model.revision,
            "task_type": None if self._prefix else "CAUSAL_LM",
        }
        found: dict[str, Any] = json.loads(json.dumps({**self._peft.to_dict(), **changes}, default=_plain))
        return found

    def facts(self) -> dict[str, Any]:
        """What a checkpoint has to agree with."""
        peft_config = self._peft
        more: dict[str, Any] = {}  # an older checkpoint has none of these, and is of a run without
        if self._whole:
            more["modules_to_save"] = [one.path for one in self._whole]
        if self._config.quantise is not None:
            more["quantise"] = self._config.quantise.model_dump(mode="json")
        return more | {
            "rank": peft_config.r,
            "alpha": peft_config.lora_alpha,
            "dora": peft_config.use_dora,
            "rslora": peft_config.use_rslora,
            "frozen_start": self._begins_from_weights,
        }


# ---------------------------------------------------------------------------------------------------------------- names


def _found_layers(model: nn.Module) -> Iterator[_Layer]:
    for path, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        depth, inner = 1, module.base_layer
        while isinstance(inner, LoraLayer):
            depth, inner = depth + 1, inner.base_layer
        name, shape = "weight", Shape(turned=isinstance(inner, Conv1D))
        if isinstance(module, ParamWrapper):
            name, shape = module.parameter_name, Shape(not module._did_swap_in_out_features, module.num_experts)
        yield _Layer(path, module, f"{path}{'.base_layer' * depth}.{name}", shape)


def _file_name(name: str) -> str:
    name = name.replace(f".{TRAINED}.", ".")
    return name.removesuffix(".weight") if ".lora_magnitude_vector." in name else name


def _where(path: str | None) -> str | None:
    """A folder's whole path, for a file that may be read from anywhere; a name on the hub as it is."""
    return str(Path(path).expanduser().resolve()) if path and Path(path).expanduser().is_dir() else path


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value)
    return str(getattr(value, "value", value))


@torch.no_grad()
def _placed(empty: Any, value: Tensor, device: str, mesh: Any, trained: bool) -> nn.Parameter:
    """A whole tensor to be put where an empty one is: all of it, or this rank's part."""
    if not isinstance(empty, DTensor):
        return nn.Parameter(value.to(device, copy=True), requires_grad=trained)
    made: Any = torch.empty_like(empty, device=device)
    shard, local = Shard.of(made, mesh), made.to_local()
    for piece in shard.pieces():
        there = tuple(slice(start, start + length) for start, length in zip(piece.offset, piece.shape, strict=True))
        local[piece.at] = value[there].to(device)
    return nn.Parameter(made, requires_grad=trained)
