"""Export of a sharded model to a Hugging Face folder, written while it is gathered: no rank ever holds all of it.

The folder is as transformers would write it, except that its configs are no stricter than transformers is
when it loads them. Callers put it into place when it is whole (`into_place`).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from hone.full_disk import until_room
from hone.models.building import save_configs
from hone.models.checkpoint_names import by_layer
from hone.models.files.tensors import save_tensors
from hone.models.loading import ValueModel
from hone.models.value_head import VALUE_HEAD_FILE

FILE_BYTES = 4 * 2**30
Named = tuple[str, Tensor]


def export_weights(model: Any, weights: Iterable[Named], folder: Path, writes: bool) -> None:
    """Write `weights` (whole, under the names of `model`) and the configs into `folder`, as `save_pretrained` would.

    Every rank must call this, because iterating over `weights` is a collective; one rank `writes`. Tied weights are
    written once.
    """
    if not isinstance(model, ValueModel):
        _export(model, weights, folder, writes)
        return
    head: dict[str, Tensor] = {}
    _export(model.body, _of_the_body(weights, head), folder, writes)
    if writes:
        save_tensors(head, folder / VALUE_HEAD_FILE)


def _export(model: Any, weights: Iterable[Named], folder: Path, writes: bool) -> None:
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    files: dict[Path, list[str]] = {}
    total, dtype = 0, model.dtype
    # To host memory as it comes: a device may be full of a rollout server's weights and cache.
    own = ((name, one.cpu() if writes else one.new_empty(0)) for name, one in weights if name not in tied)
    for chunk in by_layer(own, FILE_BYTES):
        if writes:
            folder.mkdir(parents=True, exist_ok=True)
            tensors = {n: t.contiguous().cpu() for n, t in revert_weight_conversion(model, chunk).items()}
            path = folder / f"model-{len(files) + 1:05d}.safetensors"
            save_tensors(tensors, path)
            files[path] = list(tensors)
            dtype = next(one.dtype for one in tensors.values() if one.is_floating_point())
            total += sum(one.numel() * one.element_size() for one in tensors.values())
    if writes:
        _name_files(folder, files, total)
        _save_configs(model, folder, dtype)


def _of_the_body(weights: Iterable[Named], head: dict[str, Tensor]) -> Iterator[Named]:
    """Yield a value model's body weights under the body's names, and put all others into `head`."""
    for name, tensor in weights:
        if name.startswith("body."):
            yield name.removeprefix("body."), tensor
        else:
            head[name] = tensor.cpu()


def _name_files(folder: Path, files: dict[Path, list[str]], total: int) -> None:
    """Rename one file to model.safetensors; number several files and write the index that lists their tensors."""
    if len(files) == 1:
        next(iter(files)).rename(folder / "model.safetensors")
        return
    where: dict[str, str] = {}
    for number, (path, names) in enumerate(files.items(), 1):
        final = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        path.rename(folder / final)
        where |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    text = json.dumps(index, indent=1)
    until_room(lambda: (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8"))


def _save_configs(model: Any, folder: Path, dtype: torch.dtype) -> None:
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # the name that `fully_shard` gives a class
    config.dtype = dtype
    until_room(lambda: save_configs(model, config, folder))
