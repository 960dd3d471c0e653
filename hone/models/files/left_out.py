"""Weights of a folder that a model's class passes over: heads for several tokens, towers for images or sound."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from hone.models.errors import ModelError

INDEX = "model.safetensors.index.json"


def left_out(folder: Path, model: PreTrainedModel) -> dict[str, int]:
    """Parts that the files in `folder` have and `model` ignores when it loads them: name of each, number of weights.

    Empty for a folder whose weights are still on a hub and which has no index. Raises ModelError for a damaged file.
    """
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    known = {name for name, _ in model.named_modules()}
    found: Counter[str] = Counter()
    for name in _names(folder) if ignored else ():
        parts = name.split(".")
        parents = [".".join(parts[:count]) for count in range(1, len(parts))]
        unknown = next((one for one in parents if one not in known), "")
        if unknown and any(pattern.search(name) for pattern in ignored):
            found[unknown] += not name.endswith("inv_freq")  # older files have what is computed
    return dict(+found)


def _names(folder: Path) -> Iterator[str]:
    if (folder / INDEX).is_file():
        yield from json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                yield from file.keys()
        except SafetensorError as error:
            raise ModelError(f"{path} is damaged: {error}") from error


__all__ = ["left_out"]
