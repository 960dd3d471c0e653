"""LoRA: trains a low-rank adapter on frozen weights, in one process and on every mesh.

    y = W x + scale * B (A x)        W [out, in] frozen, in compute precision; A [rank, in], B [out, rank] trained

    AdapterLayers.attach --backend shards and loads--> Adapter.fill --> trained --> merged | PEFT's files

The base never changes. PiSSA and OLoRA subtract a part from the weights; it is kept as a second, frozen adapter with
the opposite sign, so disabling the adapter gives the base, bit for bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hone.engines.lora.adapter_files import PREFIX, AdapterError, base_identity, check_base, file_name, read_adapter
from hone.engines.lora.first_values import FirstValues
from hone.engines.lora.merging import merge
from hone.engines.lora.peft_layers import INITIAL, TRAINED, AdapterLayers, Layer
from hone.engines.parts import GatherFn, PlaceFn, Weights
from hone.engines.settings import LoraConfig
from hone.models.loading import DTYPES, ValueModel
from hone.models.numerics.precision import plain_name
from hone.models.settings import ModelConfig


class Adapter:
    """The LoRA adapter of one model: its tensors, merged into the weights or as PEFT's files."""

    def __init__(self, config: LoraConfig, model: ModelConfig) -> None:
        """Raises AdapterError for settings that do not fit."""
        self._config = config
        self._model = model
        self._dtype = DTYPES[model.dtype]
        self._stored = read_adapter(config.path, config.key_of("path")) if config.path else None
        self.layers = AdapterLayers(config, self._stored, self._dtype)
        self._first = FirstValues(config, self._stored, self.layers)
        self._prefix = ""
        self._disabled = False
        self._owners: dict[str, str] = {}  # of whole modules' tensors: the name under which a tied one is kept

    # -------------------------------------------------------------------------------------------------- first values

    def fill(self, root: nn.Module, prefix: str, device: str, whole: GatherFn, place: PlaceFn) -> None:
        """Give every tensor of the adapter its first value: the same on every mesh. Every rank calls this.

        `prefix` is the adapted model's name within `root`: empty or "body.".
        """
        self._prefix = prefix
        for name, weight in root.named_parameters():
            if f".{TRAINED}." not in name and not name.startswith("score."):
                weight.requires_grad_(False)
        if self._stored is not None and self._stored.head and isinstance(root, ValueModel):
            root.load_state_dict(self._stored.head, strict=False)
        for layer in self.layers.found:
            base = layer.module.get_base_layer()
            weight = getattr(base, layer.weight.rpartition(".")[2])
            values = self._first.of_layer(layer, weight, partial(whole, layer.weight, weight))
            for adapter, part in self.layers.tensors_of(layer):
                holder = getattr(layer.module, part)[adapter]
                value = values[adapter, part]
                if value.shape != holder.weight.shape:
                    raise AdapterError(
                        f"{self._config.key_of('path')}: {layer.tensor(adapter, part)} in {self._config.path} is "
                        f"{list(value.shape)}, this model needs {list(holder.weight.shape)}"
                    )
                holder.weight = place(holder.weight, value.to(self._dtype), adapter == TRAINED)
        self._fill_whole(device, whole, place)
        first: dict[int, str] = {}
        for name, weight in root.named_parameters(remove_duplicate=False):
            self._owners[name] = first.setdefault(id(weight), name)

    def _fill_whole(self, device: str, whole: GatherFn, place: PlaceFn) -> None:
        made: dict[int, nn.Parameter] = {}  # a tied tensor is made once
        for one in self.layers.whole:
            one.take_buffers(device)
            for name, empty, base in list(one.parameters()):
                if id(empty) not in made:
                    plain = f"{one.path}.{name}"
                    value = whole(plain, base) if self._stored is None else self._first.stored(plain, base.shape)
                    made[id(empty)] = place(empty, value.to(self._dtype), True)
                one.place(name, made[id(empty)])

    # -------------------------------------------------------------------------------------------------------- in use

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Compute without the adapter."""
        before = self._disabled
        self._switch(off=True)
        try:
            yield
        finally:
            self._switch(off=before)

    def _switch(self, off: bool) -> None:
        self._disabled = off
        self.layers.switch(off)

    @property
    def names(self) -> frozenset[str]:
        """The adapter's tensors, under the names of the model's state dict."""
        of_layers = {
            self._prefix + layer.tensor(adapter, part)
            for layer in self.layers.found
            for adapter, part in self.layers.tensors_of(layer)
        }
        return frozenset(of_layers | {owner for _, _, owner in self._whole_tensors()})

    def _whole_tensors(self) -> Iterator[tuple[str, str, str]]:
        """Tensors of modules that are trained whole: plain name, name in the state dict, name of a tied owner.

        The plain name is within the adapted model.
        """
        for one in self.layers.whole:
            for name, _, _ in one.parameters():
                mine = self._prefix + one.tensor(name)
                yield f"{one.path}.{name}", mine, self._owners[mine]

    # --------------------------------------------------------------------------------------------------------- output

    @property
    def adapted(self) -> frozenset[str]:
        """Entries of the model's state dict that `merged` adds the adapter to; none while it is disabled."""
        return frozenset() if self._disabled else frozenset(self._prefix + one.weight for one in self.layers.found)

    def merged(self, base: Iterable[tuple[str, Tensor]], weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """The base's weights under their own names, with the adapter added in its precision unless it is disabled.

        `base` are the model's entries, whole. Every rank takes all of them.
        """
        adapter = weights.chosen(self.names)
        layers = {} if self._disabled else {self._prefix + layer.weight: layer for layer in self.layers.found}
        trained = {self._prefix + plain: owner for plain, _, owner in self._whole_tensors()}
        names = self.names | {mine for _, mine, _ in self._whole_tensors()}
        for name, weight in base:
            if name in names:
                continue
            plain = plain_name(name)
            if name in layers:
                yield plain, self._merge(layers[name], weight, adapter)
            elif plain in trained and not self._disabled:
                yield plain, adapter[trained[plain]].to(weight.device, copy=True)
            else:
                yield plain, weight

    def _merge(self, layer: Layer, weight: Tensor, adapter: Mapping[str, Tensor]) -> Tensor:
        def tensor(one: str, part: str) -> Tensor:
            return adapter[self._prefix + layer.tensor(one, part)].to(weight.device, self._dtype)

        adapters = dict.fromkeys(one for one, _ in self.layers.tensors_of(layer))
        terms = [(layer.module.scaling[one], tensor(one, "lora_A"), tensor(one, "lora_B")) for one in adapters]
        lengths = tensor(TRAINED, "lora_magnitude_vector") if self.layers.peft.use_dora else None
        return merge(weight.to(self._dtype), terms, layer.shape, lengths)

    def file_tensors(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """The tensors under PEFT's names; with a frozen second adapter, both as one adapter of twice the rank."""
        adapter = weights.chosen(self.names)
        for layer in self.layers.found:
            for one, part in self.layers.tensors_of(layer):
                if one == INITIAL:
                    continue
                tensor = adapter[self._prefix + layer.tensor(one, part)]
                if self.layers.begins_from_weights:
                    first = adapter[self._prefix + layer.tensor(INITIAL, part)]
                    tensor = torch.cat([tensor, first]) if part == "lora_A" else torch.cat([tensor, -first], 1)
                yield PREFIX + file_name(layer.tensor(one, part)), tensor
        for plain, _, owner in self._whole_tensors():
            yield PREFIX + plain, adapter[owner].clone()

    def file_config(self) -> dict[str, Any]:
        """PEFT's `adapter_config.json`, as JSON values."""
        config, doubled = self.layers.peft, 2 if self.layers.begins_from_weights else 1
        changes = {
            "r": config.r * doubled,
            "lora_alpha": config.lora_alpha * (math.sqrt(doubled) if config.use_rslora else doubled),
            "init_lora_weights": True,
            "inference_mode": True,
            "base_model_name_or_path": _whole_path(self._model.path),
            "revision": self._model.revision,
            "task_type": None if self._prefix else "CAUSAL_LM",
        }
        found: dict[str, Any] = json.loads(json.dumps({**config.to_dict(), **changes}, default=_plain))
        return found

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def facts(self) -> dict[str, Any]:
        """Facts in which a checkpoint and this adapter must agree."""
        config = self.layers.peft
        more: dict[str, Any] = {}  # keys that an older checkpoint does not have
        if self.layers.whole:
            more["modules_to_save"] = [one.path for one in self.layers.whole]
        if self._config.quantise is not None:
            more["quantise"] = self._config.quantise.model_dump(mode="json")
        return more | {
            "rank": config.r,
            "alpha": config.lora_alpha,
            "dora": config.use_dora,
            "rslora": config.use_rslora,
            "frozen_start": self.layers.begins_from_weights,
        }

    @cached_property
    def _base(self) -> dict[str, Any]:
        return base_identity(self._model)

    def identity(self) -> dict[str, Any]:
        """`facts` and the identity of the base weights."""
        return {**self.facts(), "base": self._base}

    def check_base(self, stored: dict[str, Any], where: Path) -> None:
        """Raise AdapterError if an adapter that was saved in `where` belongs to other weights."""
        check_base(stored, self._base, where)


def _whole_path(path: str | None) -> str | None:
    """A folder's absolute path, for a file that may be read from anywhere; a hub name as it is."""
    return str(Path(path).expanduser().resolve()) if path and Path(path).expanduser().is_dir() else path


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value)
    return str(getattr(value, "value", value))
