"""What hone's parts inside another engine's processes have in common: the token, receipts, names, short messages, and
whether a loader took what it was given.

Imported by the engine's own Python, which has hone's package folder on its path and nothing else of hone's environment.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hone.models.vision import auto_class
from hone.weights.door import Delivery

TOKEN_VARIABLE = "HONE_TOKEN"
SHOWN = 5  # names in a message; the rest is a number
LONGEST = 300  # characters of somebody else's message
LOOKS = frozenset({"__get__", "__len__", "dim", "element_size", "is_floating_point", "nelement", "numel", "size"})
"""Ways to ask what a tensor is, without its values."""


def variable(name: str) -> str:
    """An environment variable that hone sets. Raises RuntimeError if this process was started without it."""
    value = os.environ.get(name, "")
    if not value:
        raise RuntimeError(f"{name} is not set: a server of hone is started by hone")
    return value


def receipt(delivery: Delivery, rank: int) -> dict[str, Any]:
    """What a rank took in, as JSON values."""
    return {
        "replica": delivery.replica,
        "rank": rank,
        "version": delivery.version,
        "digest": delivery.digest,
        "tensors": delivery.tensors,
        "bytes": delivery.bytes,
    }


def checkpoint_shapes(config: Any) -> dict[str, torch.Size]:
    """Name -> shape of every tensor of Hugging Face's model; empty for an architecture that only the engine has."""
    try:
        with torch.device("meta"):
            model = auto_class(config.model_type).from_config(config)
        return {name: tensor.shape for name, tensor in model.state_dict().items()}
    except (ValueError, KeyError, ImportError, AttributeError, TypeError):
        return {}


def tied_names(config: Any) -> set[str]:
    """Second names of tensors that Hugging Face's model has under two: some loaders take them under one alone."""
    try:
        with torch.device("meta"):
            model = auto_class(config.model_type).from_config(config)
    except (ValueError, KeyError, ImportError, AttributeError, TypeError):
        return set()
    first: dict[int, str] = {}
    named = model.state_dict(keep_vars=True).items()
    return {name for name, tensor in named if first.setdefault(id(tensor), name) != name}


class Watched(torch.Tensor):
    """A tensor that takes its name out of `left` once something is done with its values."""

    weight: str  # its name
    left: set[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ not in LOOKS:
            for one in args:
                for tensor in one if isinstance(one, list | tuple) else (one,):
                    if isinstance(tensor, Watched):
                        tensor.left.discard(tensor.weight)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def dropped(left: set[str], config: Any) -> list[str]:
    """Names of tensors that a loader did nothing with, and should have.

    Not those that it took under another name, and not experts, of which a rank may hold some only.
    """
    return sorted(name for name in left - tied_names(config) if ".experts." not in name)


def watched(weights: Iterable[tuple[str, torch.Tensor]], left: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """`weights` for a loader; `left` has the names of those whose values it did nothing with."""
    for name, tensor in weights:
        found = tensor.as_subclass(Watched)
        found.weight, found.left = name, left
        left.add(name)
        yield name, found


def listing(names: list[str]) -> str:
    """The first names, and how many more."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def one_line(error: BaseException) -> str:
    """An exception as the beginning of one line: some list every parameter there is."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST]


__all__ = [
    "TOKEN_VARIABLE",
    "Watched",
    "checkpoint_shapes",
    "dropped",
    "listing",
    "one_line",
    "receipt",
    "variable",
    "watched",
]
