"""Export of a sharded model to a Hugging Face folder, written while it is gathered: no rank ever holds all of it.

The folder is as transformers would write it, with two differences: it is whole or absent (`into_place`), and its
configs are no stricter than transformers is when it loads them.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig
from transformers.core_model_loading import revert_weight_conversion

from hone.models.checkpoint_names import by_layer
from hone.models.loading import ValueModel
from hone.models.value_head import VALUE_HEAD_FILE

FILE_BYTES = 4 * 2**30
GENERATION = "generation_config.json"
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
        save_file(head, folder / VALUE_HEAD_FILE)


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
            save_file(tensors, path, metadata={"format": "pt"})
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
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def _save_configs(model: Any, folder: Path, dtype: torch.dtype) -> None:
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # the name that `fully_shard` gives a class
    config.dtype = dtype
    save_configs(model, config, folder)


@contextmanager
def into_place(folder: Path, writes: bool = True) -> Iterator[Path]:
    """A new folder beside `folder` to write into. It takes the place of `folder` at the end, or is removed on an error.

    Without `writes`, another rank writes: nothing is removed or moved here.
    """
    folder = folder.resolve()  # a link to another disk stays one
    partial, old = (folder.with_name(f".{folder.name}.{kind}") for kind in ("partial", "old"))
    if not writes:
        yield partial
        return
    for one in (partial, old):  # of a process that was killed
        shutil.rmtree(one, ignore_errors=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def save_configs(model: Any, config: Any, folder: Path) -> None:
    """Write config.json and, for a model that generates, generation_config.json.

    transformers loads files of published models that its own `save_pretrained` refuses to write: a temperature beside
    `do_sample: false`, or generation settings in config.json. The latter move to generation_config.json.
    """
    config, generation = _apart(config, getattr(model, "generation_config", None))
    config.save_pretrained(folder)
    if model.can_generate() and generation is not None:
        _write(generation, folder)


def save_model(model: Any, folder: Path) -> None:
    """`model.save_pretrained(folder)` for a whole model in this process, with the configs of `save_configs`."""
    config, given = model.config, getattr(model, "generation_config", None)
    plain, generation = _apart(config, given)
    try:
        model.config = plain
        if given is not None:
            model.generation_config = GenerationConfig()
        model.save_pretrained(folder)
    finally:
        model.config = config
        if given is not None:
            model.generation_config = given
    if model.can_generate() and generation is not None:
        _write(generation, folder)


def _write(generation: GenerationConfig, folder: Path) -> None:
    generation.to_json_file(folder / GENERATION, use_diff=True, keys_to_pop=["compile_config"])


def _apart(config: Any, generation: GenerationConfig | None) -> tuple[Any, GenerationConfig | None]:
    """Copies of a model's config without generation settings, and of its generation config with them."""
    config, generation = copy.deepcopy(config), copy.deepcopy(generation)
    for name, value in config._get_generation_parameters().items():
        setattr(config, name, None)
        if generation is not None and getattr(generation, name, None) is None:
            setattr(generation, name, value)
    return config, generation
