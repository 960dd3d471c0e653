"""Give weights of a state dict the names and shapes that the model's files have.

transformers stores some weights differently from the files: it fuses the experts of a layer into one tensor, and the
files have one per expert. Servers such as vLLM load the layout of the files, so they are sent that layout. Fused
experts are converted a slice at a time, so that nobody holds a whole layer of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

from hone.models.vision.model import auto_class

Named = tuple[str, Tensor]
SLICE_BYTES = 128 * 2**20  # of a fused weight that are converted together

_layouts: dict[str, FileLayout] = {}  # of the last config


class FileLayout:
    """Names and cuts of state dict entries in the files of one architecture."""

    def __init__(self, model: nn.Module) -> None:
        """`model` is on the meta device. Reading the conversion of every weight takes seconds for a large mixture."""
        self._model = model
        state = model.state_dict()
        self.shapes: dict[str, torch.Size] = {name: one.shape for name, one in state.items()}
        self._names: dict[str, tuple[str, ...]] = {}  # of weights that the files have differently
        self._cut: set[str] = set()  # of these, the ones that can be converted in slices of the first dimension
        self._is_by_weight = True
        self._fused = self.shapes
        mapping = get_model_conversion_mapping(model, add_legacy=False)  # type: ignore[arg-type]
        # `revert_weight_conversion` changes no prefixes
        if not all(isinstance(change, PrefixChange) for change in mapping):
            files = self._revert(state)
            self.shapes = {name: one.shape for name, one in files.items()}
            self._read(state, files)

    def _read(self, state: Mapping[str, Tensor], files: Mapping[str, Tensor]) -> None:
        """Find the weights that the files have differently, each by itself if that gives what all together give."""
        for name, tensor in state.items():
            if name in files and files[name].shape == tensor.shape:
                continue
            found = self._revert({name: tensor}) if tensor.dim() else {}
            if any(one not in files or files[one].shape != part.shape for one, part in found.items()):
                break
            self._names[name] = names = tuple(found)
            rows = len(tensor)
            first = self._revert({name: tensor[:1]}) if len(names) % rows == 0 else {}
            if tuple(first) == names[::rows] and all(first[one].shape == files[one].shape for one in first):
                self._cut.add(name)
        made = [one for names in self._names.values() for one in names]
        kept = [name for name in state if name not in self._names]
        self._is_by_weight = sorted((*made, *kept)) == sorted(files)

    def convert(self, weights: Iterable[Named], slice_bytes: int = SLICE_BYTES) -> Iterator[Named]:
        """Yield `weights` in the layout of the files; weights that have it already stay as they are."""
        if not self._is_by_weight:  # some formats fuse several weights of a layer
            for layer in by_layer(weights):
                here = {name: one for name, one in layer.items() if self._has(name, one)}
                yield from here.items()
                yield from self._revert({name: one for name, one in layer.items() if name not in here}).items()
            return
        for name, tensor in weights:
            if name not in self._names or self._has(name, tensor):
                yield name, tensor
            elif name in self._cut and tensor.shape == self._fused[name]:
                yield from self._by_slice(name, tensor, slice_bytes)
            else:
                yield from self._revert({name: tensor}).items()

    def _has(self, name: str, tensor: Tensor) -> bool:
        return self.shapes.get(name) == tensor.shape

    def _by_slice(self, name: str, tensor: Tensor, slice_bytes: int) -> Iterator[Named]:
        """Convert a fused weight slice by slice; a slice's experts are numbered from 0, which is put right here."""
        rows, names = len(tensor), self._names[name]
        at_once = max(slice_bytes * rows // max(tensor.nbytes, 1), 1)
        for start in range(0, rows, at_once):
            parts = list(self._revert({name: tensor[start : start + at_once]}).values())
            count = min(at_once, rows - start)
            for number, part in enumerate(parts):
                kind, row = divmod(number, count)
                yield names[kind * rows + start + row], part

    def _revert(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = revert_weight_conversion(self._model, weights)  # type: ignore[arg-type]
        return found


def layout_of(config: Any) -> FileLayout | None:
    """The file layout of a model; None for an architecture that transformers does not have."""
    key = config.to_json_string(use_diff=False)
    if key not in _layouts:
        try:
            with torch.device("meta"):
                model = auto_class(config.model_type).from_config(config)
        except ValueError:
            return None
        _layouts.clear()
        _layouts[key] = FileLayout(model)
    return _layouts[key]


def as_in_files(config: Any, weights: Iterable[Named]) -> Iterator[Named]:
    """Yield `weights` in the layout of the model's files; for most architectures they are unchanged."""
    layout = layout_of(config)
    yield from weights if layout is None else layout.convert(weights)


def by_layer(weights: Iterable[Named], at_least_bytes: int = 0) -> Iterator[dict[str, Tensor]]:
    """Group neighbouring weights into at least `at_least_bytes`. A layer is never divided, because some formats fuse
    its weights."""
    chunk: dict[str, Tensor] = {}
    held, layer = 0, ""
    for name, tensor in weights:
        now = f".{name}".partition(".layers.")[2].partition(".")[0]
        if chunk and held > at_least_bytes and now != layer:
            yield chunk
            chunk, held = {}, 0
        chunk[name], layer = tensor, now
        held += tensor.numel() * tensor.element_size()
    yield chunk
