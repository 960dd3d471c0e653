"""Shared code of hone's parts inside other engines: token, receipts, names, short messages, and a check of loaders.

The engine's own Python imports it, with hone's package folder on its path and nothing else of hone's environment.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from hone.models.checkpoint_names import layout_of
from hone.models.parts.views import Reads
from hone.weights.delivery import Delivery

TOKEN_VARIABLE = "HONE_TOKEN"
NAMED = 5  # most names in a message
LONGEST = 300  # most characters of an engine's message


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


def lost_biases(reads: Reads) -> list[str]:
    """List biases that a loader ignored although it used their weight: the engine's model has no place for them.

    Modules that it ignores whole do not count: a tower that is not served, a tied head, experts of other ranks.
    """
    biases = (name for name in reads.shapes if name.endswith(".bias") and ".experts." not in name)
    return sorted(
        name for name in biases if name not in reads.boxes and f"{name.removesuffix('bias')}weight" in reads.boxes
    )


def listing(names: list[str]) -> str:
    """Join the first names, with the number of the others."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def one_line(error: BaseException) -> str:
    """Shorten an exception to the start of its text, on one line: some messages list every parameter."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST]


__all__ = [
    "TOKEN_VARIABLE",
    "checkpoint_shapes",
    "listing",
    "lost_biases",
    "one_line",
    "receipt",
    "variable",
]
