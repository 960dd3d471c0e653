"""What ranks tell each other as bytes: JSON for the shape, safetensors for the numbers. Nothing is unpickled.

value --encode--> [8 bytes: length of the JSON] [JSON] [tensors]     --decode--> an equal value

Known are JSON's own types, tuples, sets, bytes, tensors, arrays, paths, torch dtypes, and the nouns of `hone.types`.
Long tuples of numbers (tokens, log-probs) travel as tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save

from hone import types

LONG = 16  # tuples of at least so many numbers travel as tensors
_HEAD = 8  # bytes that hold the length of the JSON


def encode(value: Any) -> bytes:
    """Raises TypeError for a value of another kind."""
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_tree(value, tensors)).encode()
    return len(text).to_bytes(_HEAD, "big") + text + (save(tensors) if tensors else b"")


def decode(payload: bytes) -> Any:
    """What was encoded. Raises ValueError for bytes that `encode` did not write."""
    end = _HEAD + int.from_bytes(payload[:_HEAD], "big")
    tensors = load(payload[end:]) if len(payload) > end else {}
    return _value(json.loads(payload[_HEAD:end]), tensors)


def _tree(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """JSON of a value; what JSON has no word for is [kind, content], and a list is ["list", ...] for that reason."""
    if isinstance(value, Enum):
        return ["enum", type(value).__name__, value.value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        if getattr(types, type(value).__name__, None) is not type(value):
            raise TypeError(f"{type(value).__name__} is not a noun of hone.types: it cannot be told to other ranks")
        return ["noun", type(value).__name__, {n: _tree(getattr(value, n), tensors) for n in _told(value)}]
    if isinstance(value, tuple) and (numbers := _as_numbers(value)) is not None:
        return ["numbers", _kept(numbers, tensors)]
    for kind, known, content in _KINDS:
        if isinstance(value, known):
            return [kind, content(value, tensors)]
    raise TypeError(f"a value of type {type(value).__name__} cannot be told to other ranks")


def _told(value: Any) -> list[str]:
    return [one.name for one in fields(value) if not one.metadata.get("of_this_process")]


def _as_numbers(value: tuple[Any, ...]) -> torch.Tensor | None:
    """A long tuple of ints or of floats as a tensor that holds them exactly."""
    if len(value) >= LONG:
        kinds = set(map(type, value))
        if kinds == {float}:
            return torch.tensor(value, dtype=torch.float64)
        if kinds == {int} and min(value) >= -(2**63) and max(value) < 2**63:
            return torch.tensor(value, dtype=torch.int64)
    return None


def _kept(tensor: torch.Tensor, tensors: dict[str, torch.Tensor]) -> str:
    name = str(len(tensors))
    tensors[name] = tensor.detach().cpu().contiguous().clone()  # safetensors refuses tensors that share memory
    return name


Tensors = dict[str, torch.Tensor]
_KINDS: tuple[tuple[str, Any, Callable[[Any, Tensors], Any]], ...] = (
    ("tensor", torch.Tensor, _kept),
    ("array", np.ndarray, lambda value, tensors: _kept(torch.from_numpy(np.ascontiguousarray(value)), tensors)),
    ("bytes", bytes, lambda value, tensors: _kept(torch.tensor(list(value), dtype=torch.uint8), tensors)),
    ("tuple", tuple, lambda value, tensors: [_tree(one, tensors) for one in value]),
    ("list", list, lambda value, tensors: [_tree(one, tensors) for one in value]),
    ("set", frozenset, lambda value, tensors: [_tree(one, tensors) for one in sorted(value)]),
    ("dict", Mapping, lambda value, tensors: [[_tree(k, tensors), _tree(v, tensors)] for k, v in value.items()]),
    ("path", Path, lambda value, tensors: str(value)),
    ("dtype", torch.dtype, lambda value, tensors: str(value).removeprefix("torch.")),
)  # fmt: skip


def _value(tree: Any, tensors: Tensors) -> Any:
    if not isinstance(tree, list):
        return tree
    kind, content = tree[0], tree[-1]
    if kind in ("enum", "noun"):
        known = getattr(types, tree[1], None)
        if not isinstance(known, type) or not (is_dataclass(known) or issubclass(known, Enum)):
            raise ValueError(f"{tree[1]!r} is not a noun of hone.types")
        return known(content) if kind == "enum" else known(**{n: _value(one, tensors) for n, one in content.items()})
    if kind not in _BACK:
        raise ValueError(f"{kind!r} is not a kind of value that ranks tell each other")
    return _BACK[kind](content, tensors)


_BACK: dict[str, Callable[[Any, Tensors], Any]] = {
    "tensor": lambda name, tensors: tensors[name],
    "array": lambda name, tensors: tensors[name].numpy(),
    "bytes": lambda name, tensors: tensors[name].numpy().tobytes(),
    "numbers": lambda name, tensors: tuple(tensors[name].tolist()),
    "tuple": lambda content, tensors: tuple(_value(one, tensors) for one in content),
    "list": lambda content, tensors: [_value(one, tensors) for one in content],
    "set": lambda content, tensors: frozenset(_value(one, tensors) for one in content),
    "dict": lambda content, tensors: {_value(k, tensors): _value(v, tensors) for k, v in content},
    "path": lambda content, tensors: Path(content),
    "dtype": lambda content, tensors: getattr(torch, content),
}
