"""Weights of a folder that a model's class passes over: heads for several tokens, towers for images or sound."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from hone.models.errors import ModelError

WHOLE = "model.safetensors"
INDEX = f"{WHOLE}.index.json"


def left_out(folder: Path, model: PreTrainedModel) -> dict[str, int]:
    """Parts that the files in `folder` have and `model` ignores when it loads them: name of each, number of weights.

    Empty for a folder whose weights are still on a hub and which has no index. Raises ModelError for a damaged file.
    """
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    known = dict(model.named_modules())
    short = f"{model.base_model_prefix}."
    known |= {name.removeprefix(short): module for name, module in known.items()}  # older files, such as GPT-2's
    found = Counter(_unknown(name, known) for name in (_names(folder) if ignored else ()))
    return {part: count for part, count in found.items() if part and any(one.search(f"{part}.") for one in ignored)}


def _unknown(name: str, known: Mapping[str, nn.Module]) -> str:
    """The outermost module of a weight's name that the model does not have; empty: it has them all."""
    parts = name.split(".")
    for count in range(1, len(parts)):
        parent, module = ".".join(parts[: count - 1]), ".".join(parts[:count])
        if module not in known:
            is_stacked = parts[count - 1].isdigit() and not isinstance(known[parent], nn.ModuleList)  # experts
            return "" if is_stacked else module
    return ""


def read_index(folder: Path) -> tuple[dict[str, str], int] | None:
    """The file of each weight, and the bytes of all (0: unknown), from a folder's index. Raises ModelError.

    None if there is no index, or if one file has all weights: transformers reads that file and no index.
    """
    path = folder / INDEX
    if (folder / WHOLE).is_file() or not path.is_file():
        return None
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is damaged: {error}") from error
    found = said.get("weight_map") if isinstance(said, dict) else None
    if not isinstance(found, dict) or not all(isinstance(one, str) for one in found.values()):
        raise ModelError(f"{path} is damaged: weight_map should give the file of each weight, found {found!r:.60}")
    metadata = said.get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return found, int(size) if isinstance(size, int | float) and math.isfinite(size) else 0


def require_all_files(folder: Path) -> None:
    """Raise ModelError if files that the folder's index names are not there, as after a download that was stopped."""
    index = read_index(folder)
    missing = sorted({file for file in (index[0].values() if index else ()) if not (folder / file).is_file()})
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{folder} has no {missing[0]}{more}, which {INDEX} names; download the model again")


def _names(folder: Path) -> Iterator[str]:
    if (index := read_index(folder)) is not None:
        yield from index[0]
        return
    whole = folder / WHOLE
    for path in [whole] if whole.is_file() else sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                yield from file.keys()
        except SafetensorError as error:
            raise ModelError(f"{path} is damaged: {error}") from error


__all__ = ["INDEX", "WHOLE", "left_out", "read_index", "require_all_files"]
