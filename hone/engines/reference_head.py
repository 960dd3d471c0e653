"""The head of a reference model, for a KL over the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch

from hone.engines.logprobs import Head
from hone.models.loading import DTYPES, load_head
from hone.models.settings import ModelConfig


def head_of_reference(
    model: ModelConfig, compute_dtype: str, device: str, head_dtype: torch.dtype | None = None
) -> Callable[[], Head]:
    """Return a function that loads the reference's head for "full_kl" at its first call, and keeps it.

    Another worker runs the reference's body and sends its "states". The weights have the precision of
    `compute_dtype` and are held in `head_dtype` if it is given.
    """

    @cache
    def load() -> Head:
        head = Head.of(load_head(model))
        dtype = DTYPES[compute_dtype]
        bias = head.bias.detach().to(device, dtype) if head.bias is not None else None
        weight = head.weight.detach().to(device, dtype).clone()
        return replace(head, weight=weight, bias=bias, dtype=head_dtype).converted()

    return load
