"""The first values of an adapter: drawn from the seed and a weight's name, computed from the weights, or read."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from hone.engines.lora.adapter_files import AdapterError, StoredAdapter, file_name
from hone.engines.lora.peft_layers import INITIAL, TRAINED, AdapterLayers, Layer
from hone.engines.settings import LoraConfig


class FirstValues:
    """Whole tensors on the CPU: the same for every number of ranks."""

    def __init__(self, config: LoraConfig, stored: StoredAdapter | None, layers: AdapterLayers) -> None:
        self._config = config
        self._stored = stored
        self._layers = layers

    def stored(self, name: str, shape: torch.Size) -> Tensor:
        """A tensor of the adapter that the run continues from. Raises AdapterError if it is missing or misshapen."""
        assert self._stored is not None
        found = self._stored.tensors.get(name)
        if found is None or found.shape != shape:
            there = "does not have it" if found is None else f"has it as {list(found.shape)}"
            raise AdapterError(
                f"{self._config.key_of('path')}: {self._config.path} should have {name} as {list(shape)}, and {there}"
            )
        return found

    def of_layer(self, layer: Layer, weight: Tensor, whole: Callable[[], Tensor]) -> dict[tuple[str, str], Tensor]:
        """The values of a layer by (adapter, part). `whole` gathers its weight; every rank calls this."""
        if self._stored is not None:
            return self._stored_values(layer)
        layers = self._layers
        digest = hashlib.blake2b(f"{self._config.seed} {layer.weight}".encode(), digest_size=4).digest()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int.from_bytes(digest, "big"))
            if layer.shape.experts:
                return self._expert_values(layer)
            needed = layers.begins_from_weights or layers.peft.use_dora
            made = layers.made_by_peft(layer, whole() if needed else None, weight.shape)
        found = {(TRAINED, part): getattr(made, part)[TRAINED].weight.detach() for part in ("lora_A", "lora_B")}
        if layers.begins_from_weights:
            found |= {(INITIAL, part): found[TRAINED, part].clone() for part in ("lora_A", "lora_B")}
        if layers.peft.use_dora:
            found[TRAINED, "lora_magnitude_vector"] = made.lora_magnitude_vector[TRAINED].weight.detach()
        return found

    def _expert_values(self, layer: Layer) -> dict[tuple[str, str], Tensor]:
        a, b = (getattr(layer.module, part)[TRAINED].weight.shape for part in ("lora_A", "lora_B"))
        first = torch.empty(a)
        if self._config.init == "gaussian":
            nn.init.normal_(first, std=1 / self._layers.peft.r)
        else:
            nn.init.kaiming_uniform_(first, a=math.sqrt(5))
        return {(TRAINED, "lora_A"): first, (TRAINED, "lora_B"): torch.zeros(b)}

    def _stored_values(self, layer: Layer) -> dict[tuple[str, str], Tensor]:
        assert self._stored is not None
        found = {}
        for adapter, part in self._layers.tensors_of(layer):
            name = file_name(layer.tensor(adapter, part))
            if name not in self._stored.tensors:
                raise AdapterError(f"{self._config.key_of('path')}: {self._config.path} lacks {name}")
            found[adapter, part] = self._stored.tensors[name]
        return found
