"""What hone's parts inside another engine's processes have in common: the token, receipts, names, short messages.

Imported by the engine's own Python, which has hone's package folder on its path and nothing else of hone's environment.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from hone.models.vision import auto_class
from hone.weights.door import Delivery

TOKEN_VARIABLE = "HONE_TOKEN"
SHOWN = 5  # names in a message; the rest is a number
LONGEST = 300  # characters of somebody else's message


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


def listing(names: list[str]) -> str:
    """The first names, and how many more."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def one_line(error: BaseException) -> str:
    """An exception as the beginning of one line: some list every parameter there is."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST]


__all__ = ["TOKEN_VARIABLE", "checkpoint_shapes", "listing", "one_line", "receipt", "variable"]
