"""Shared code of hone's parts inside other engines: token, receipts, names, short messages, and a check of loaders.

The engine's own Python imports it, with hone's package folder on its path and nothing else of hone's environment.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hone.models.checkpoint_names import layout_of
from hone.weights.delivery import Delivery

TOKEN_VARIABLE = "HONE_TOKEN"
NAMED = 5  # most names in a message
LONGEST = 300  # most characters of an engine's message
LOOKS = frozenset(
    {"__len__", "dim", "element_size", "is_contiguous", "is_floating_point", "nelement", "numel", "size", "stride"}
)
"""Methods that read a tensor's metadata only."""
VALUES = frozenset({"data", "T", "mT", "H", "mH"})  # attributes that read values


def variable(name: str) -> str:
    """Return an environment variable that hone sets. Raises RuntimeError if it is missing."""
    value = os.environ.get(name, "")
    if not value:
        raise RuntimeError(f"{name} is not set: a server of hone is started by hone")
    return value


def receipt(delivery: Delivery, rank: int) -> dict[str, Any]:
    """Describe what a rank received, as JSON values."""
    return {
        "replica": delivery.replica,
        "rank": rank,
        "version": delivery.version,
        "digest": delivery.digest,
        "tensors": delivery.tensors,
        "bytes": delivery.bytes,
    }


def checkpoint_shapes(config: Any) -> dict[str, torch.Size]:
    """Return name -> shape of all tensors of a model's files; empty for an architecture that transformers lacks."""
    try:
        layout = layout_of(config)
    except (ValueError, KeyError, ImportError, AttributeError, TypeError):
        return {}
    return {} if layout is None else layout.shapes


class Watched(torch.Tensor):
    """Tensor that records in `read` whether a loader used its values; operations on it return ordinary tensors."""

    weight: str  # its name
    read: dict[str, bool]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if not _looks_only(func):
            for one in (*args, *named.values()):
                for tensor in one if isinstance(one, list | tuple) else (one,):
                    if isinstance(tensor, Watched):
                        tensor.read[tensor.weight] = True
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **named)
            return found.as_subclass(torch.Tensor) if isinstance(found, Watched) else found


def _looks_only(func: Any) -> bool:
    if func.__name__ == "__get__":  # of an attribute
        return getattr(getattr(func, "__self__", None), "__name__", "") not in VALUES
    return func.__name__ in LOOKS


def watched(weights: Iterable[tuple[str, torch.Tensor]], read: dict[str, bool]) -> Iterator[tuple[str, torch.Tensor]]:
    """Wrap `weights` for a loader; `read` records for each name whether the loader used the values."""
    for name, tensor in weights:
        found = tensor.as_subclass(Watched)
        found.weight, found.read = name, read
        read[name] = False
        yield name, found


def lost_biases(read: dict[str, bool]) -> list[str]:
    """List biases that a loader ignored although it used their weight: the engine's model has no place for them.

    Modules that it ignores whole do not count: a tower that is not served, a tied head, experts of other ranks.
    """
    biases = (name for name in read if name.endswith(".bias") and ".experts." not in name)
    return sorted(name for name in biases if not read[name] and read.get(f"{name.removesuffix('bias')}weight"))


def listing(names: list[str]) -> str:
    """Join the first names, with the number of the others."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def one_line(error: BaseException) -> str:
    """Shorten an exception to the start of its text, on one line: some messages list every parameter."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST]


__all__ = [
    "TOKEN_VARIABLE",
    "Watched",
    "checkpoint_shapes",
    "listing",
    "lost_biases",
    "one_line",
    "receipt",
    "variable",
    "watched",
]
