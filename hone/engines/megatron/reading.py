"""Reading boxes of Hugging Face weights, from safetensors files (each rank reads its boxes only) or a loaded model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from hone.engines.megatron.names import Box
from hone.models.errors import ModelError
from hone.models.loading import check_model_source
from hone.models.settings import ModelConfig
from hone.models.value_head import SCORE, read_value_head


class Reader(Protocol):
    """Where the weights of a model come from."""

    def read(self, box: Box) -> Tensor:
        """The values of a box. Raises ModelError if they are not there."""


class LoadedWeights:
    """The weights of a model in memory."""

    def __init__(self, model: nn.Module) -> None:
        self._state: Mapping[str, Tensor] = model.state_dict()

    def read(self, box: Box) -> Tensor:
        return self._state[box.name][_there(box)]


class StoredWeights:
    """The safetensors files of a folder."""

    def __init__(self, folder: Path, prefix: str, model: ModelConfig) -> None:
        """`prefix` is what the names of the body's weights begin with in the engine: "model." or "body."."""
        self._folder = folder
        self._model = model
        self._prefix = prefix
        self._files: dict[str, Any] = {}  # stored name -> file
        for path in sorted(folder.glob("*.safetensors")):
            try:
                file: Any = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} is truncated or damaged: {error}") from error
            self._files |= dict.fromkeys(file.keys(), file)

    def read(self, box: Box) -> Tensor:
        if box.name == SCORE:
            head = read_value_head(self._folder, check_model_source(self._model))
            return torch.zeros(box.shape) if head is None else head
        if (one := _stored_expert(box)) is not None and box.name not in self._files:
            return self._read(one).view(box.shape)
        return self._read(box)

    def _read(self, box: Box) -> Tensor:
        name = self._stored_name(box.name)
        found = self._files[name].get_slice(name)
        if tuple(found.get_shape()) != box.whole:
            raise ModelError(
                f"{self._folder}: {name} is {list(found.get_shape())}, and config.json makes it {list(box.whole)}"
            )
        return found[_there(box)]  # type: ignore[no-any-return]

    def _stored_name(self, name: str) -> str:
        """A body is stored as part of a language model, or by itself."""
        rest = name.removeprefix(self._prefix)
        names = [name, f"model.{rest}", rest] if rest != name else [name]
        if rest == "embed_tokens.weight":
            names.append("lm_head.weight")  # tied weights are stored under one name
        for one in names:
            if one in self._files:
                return one
        raise ModelError(f"model.path {str(self._folder)!r} lacks the weight {name}")


def _stored_expert(box: Box) -> Box | None:
    """A box of fused experts as the files have it, one matrix for each expert; None for other weights."""
    path, _, matrix = box.name.rpartition(".")
    if not path.endswith(".experts"):
        return None
    rows, columns = box.shape[1:]
    which = "down" if matrix == "down_proj" else ("gate" if box.offset[1] == 0 else "up")
    name = f"{path}.{box.offset[0]}.{which}_proj.weight"
    return replace(box, name=name, whole=(rows, columns), offset=(0, 0), shape=(rows, columns))


def _there(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(box.offset, box.shape, strict=True))
