"""Loading of a rebuilt model: the regions that a rank holds, from files or from a model in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from hone.models.errors import ModelError
from hone.models.loading import check_model_source, empty_model, folder_of, load_language_model, load_value_model
from hone.models.quantised import refuse_leftovers
from hone.models.rotary import fix_rotary
from hone.models.settings import ModelConfig
from hone.models.value_head import SCORE, read_value_head


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a whole weight."""

    name: str  # in the state dict of the transformers model
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def there(self) -> tuple[slice, ...]:
        """Return the position in the whole weight."""
        return tuple(slice(start, start + length) for start, length in zip(self.offset, self.shape, strict=True))


class Reader(Protocol):
    """Source of the weights of a model."""

    def read(self, region: Region) -> Tensor:
        """The values of a region. Raises ModelError if they are not there."""


class LoadedWeights:
    """The weights of a model in memory."""

    def __init__(self, model: nn.Module) -> None:
        self._state: Mapping[str, Tensor] = model.state_dict()

    def read(self, region: Region) -> Tensor:
        return self._state[region.name][region.there]


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
        refuse_leftovers(self._files, f"model.path {str(folder)!r}")

    def require_tied(self) -> None:
        """Raise ModelError if the files have a head that is not the embedding, although config.json ties both."""
        head, embedding = (self._find(name) for name in ("lm_head.weight", f"{self._prefix}embed_tokens.weight"))
        if head is None or embedding is None or head == embedding:
            return
        values = [self._files[name].get_tensor(name) for name in (head, embedding)]
        if not torch.equal(*values):
            raise ModelError(
                f"{self._folder}: config.json has tie_word_embeddings=true, and {head} differs from {embedding}; set "
                "tie_word_embeddings to false there, or use backend fsdp2"
            )

    def read(self, region: Region) -> Tensor:
        if region.name == SCORE:
            head = read_value_head(self._folder, check_model_source(self._model))
            return torch.zeros(region.shape) if head is None else head[region.there]
        one = _stored_expert(region) if self._find(region.name) is None else None
        if one is None:
            return self._read(region)
        for name in (one.name, _in_mixtral(one.name)):
            if self._find(name) is not None:
                return self._read(replace(one, name=name)).view(region.shape)
        return self._read(one)

    def _read(self, region: Region) -> Tensor:
        name = self._stored_name(region.name)
        found = self._files[name].get_slice(name)
        if tuple(found.get_shape()) != region.whole:
            raise ModelError(
                f"{self._folder}: {name} is {list(found.get_shape())}, and config.json makes it {list(region.whole)}"
            )
        return found[region.there]  # type: ignore[no-any-return]

    def _stored_name(self, name: str) -> str:
        found = self._find(name)
        if found is None:
            raise ModelError(f"model.path {str(self._folder)!r} lacks the weight {name}")
        return found

    def _find(self, name: str) -> str | None:
        """A body is stored as part of a language model, or by itself."""
        rest = name.removeprefix(self._prefix)
        names = [name, f"model.{rest}", rest] if rest != name else [name]
        if rest == "embed_tokens.weight":
            names.append("lm_head.weight")  # tied weights are stored under one name
        names += [one.replace(".mlp.", ".block_sparse_moe.") for one in names]  # Mixtral
        return next((one for one in names if one in self._files), None)


def _stored_expert(region: Region) -> Region | None:
    """A region of fused experts as the files have it, one matrix for each expert; None for other weights."""
    path, _, matrix = region.name.rpartition(".")
    if not path.endswith(".experts"):
        return None
    number, row, column = region.offset
    _, rows, columns = region.whole
    which = "down"
    if matrix == "gate_up_proj":
        rows //= 2
        which, row = ("gate", "up")[row // rows], row % rows
    return Region(f"{path}.{number}.{which}_proj.weight", (rows, columns), (row, column), region.shape[1:])


def _in_mixtral(name: str) -> str:
    """The name of an expert's matrix in the files of Mixtral."""
    for new, old in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        name = name.replace(new, old)
    return name


def body_prefix(is_value_model: bool) -> str:
    """Return the prefix of the body's weights."""
    return "body." if is_value_model else "model."


def open_model(model: ModelConfig, is_value_model: bool) -> tuple[Any, Reader]:
    """The transformers model on the meta device, and what its weights are read from.

    A model from `model.build` is built whole first. Raises ModelError as `load_language_model` does.
    """
    if model.build is None:
        empty: Any = empty_model(model, is_value_model)
        fix_rotary(empty, model.used.context, f"model.path {model.path!r}")
        stored = StoredWeights(folder_of(model), body_prefix(is_value_model), model)
        if not is_value_model and empty.config.tie_word_embeddings:
            stored.require_tied()
        return empty, stored
    loaded: Any = load_value_model(model) if is_value_model else load_language_model(model)
    reader = LoadedWeights(loaded)
    emptied = loaded.to("meta")
    if not is_value_model:
        emptied.tie_weights()
    return emptied, reader
