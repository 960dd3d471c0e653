"""GGUF files (llama.cpp): dequantise one into a Hugging Face folder, weights, config, tokenizer and chat template.

Dequantising does not undo the rounding: training starts from the dequantised values, and exports are not GGUF. A file
is converted once, into hone's cache folder, and again when it has changed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import quantization_config

from hone.models.errors import ModelError
from hone.models.files.packaged import cache_folder
from hone.models.files.partial import partial_of
from hone.models.files.progress_bars import without_progress_bars

LOG = logging.getLogger("hone.models")
SUFFIX = ".gguf"
WEIGHTS = ".safetensors"
PLAIN_BITS = 15.5  # per weight; a file with fewer is quantised


def converted(file: Path, key: str) -> Path:
    """The folder with the model of a GGUF file in float32; `key` is the setting that names the file, for errors.

    Raises ModelError without the package gguf, and for a file that transformers cannot read.
    """
    stat = file.stat()
    stamp = hashlib.sha256(f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:12]
    folder = cache_folder() / "gguf" / f"{file.stem}-{stamp}"
    if not (folder / "config.json").is_file():
        _convert(file, folder, key)
    return folder


def copy_model(source: Path, target: Path) -> None:
    """Copy a model folder. Weights, which nobody changes, become hard links where the disk is the same."""
    target.mkdir(parents=True)
    for file in source.iterdir():
        copy = target / file.name
        if file.suffix != WEIGHTS:
            shutil.copyfile(file, copy)
            continue
        try:
            os.link(file, copy)
        except OSError:  # another disk, or one without links
            shutil.copyfile(file, copy)


def _convert(file: Path, folder: Path, key: str) -> None:
    if find_spec("gguf") is None:
        raise ModelError(f"{key}: {file} needs the package gguf: pip install 'gguf>=0.19'")
    LOG.warning("converting %s to float32 in %s, once", file, folder)
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    with partial_of(folder) as partial:
        try:
            with without_progress_bars():
                model = AutoModelForCausalLM.from_pretrained(**where, **_dequantising(), dtype=torch.float32)
                tokenizer = AutoTokenizer.from_pretrained(**where)
            model.config.__dict__.pop("quantization_config", None)  # or whoever loads it would quantise again
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
        except (OSError, ValueError, RuntimeError, KeyError, IndexError, ImportError, NotImplementedError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelError(f"{key}: transformers cannot read the GGUF file {file}: {reason}") from error
        bits = 8 * file.stat().st_size / max(sum(one.numel() for one in model.parameters()), 1)
        if bits < PLAIN_BITS:
            LOG.warning(
                "%s has %.1f bits per weight: training starts from the dequantised values, and what the "
                "rounding lost stays lost",
                file.name,
                bits,
            )
        try:
            partial.rename(folder)
        except OSError:  # another process was faster
            if not (folder / "config.json").is_file():
                raise


def _dequantising() -> dict[str, Any]:
    """Options of `from_pretrained`. Before 5.17, transformers has no such class, and dequantises always."""
    kind = getattr(quantization_config, "GgufConfig", None)
    return {} if kind is None else {"quantization_config": kind(dequantize=True)}
