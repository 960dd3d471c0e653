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
LOOKS = frozenset(
    {"__len__", "dim", "element_size", "is_contiguous", "is_floating_point", "nelement", "numel", "size", "stride"}
)
"""Ways to ask what a tensor is, without its values."""
VALUES = frozenset({"data", "T", "mT", "H", "mH"})  # attributes that give them


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


class Watched(torch.Tensor):
    """A tensor that says in `read` that something was done with its values; what comes of it is plain."""

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
    """`weights` for a loader; `read` has their names, and whether it did something with their values."""
    for name, tensor in weights:
        found = tensor.as_subclass(Watched)
        found.weight, found.read = name, read
        read[name] = False
        yield name, found


def lost_biases(read: dict[str, bool]) -> list[str]:
    """Biases that a loader did nothing with, though it took the weight beside: its model has no place for them.

    Whole modules that it leaves out are none of these: a tower that is not served, a tied head, experts of other ranks.
    """
    biases = (name for name in read if name.endswith(".bias") and ".experts." not in name)
    return sorted(name for name in biases if not read[name] and read.get(f"{name.removesuffix('bias')}weight"))


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
    "listing",
    "lost_biases",
    "one_line",
    "receipt",
    "variable",
    "watched",
]
