"""Merge an adapter into a weight: W + sum of scale B A; for DoRA, rows are scaled to their learned norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """The layout of a weight and of its adapter's matrices."""

    turned: bool = False  # the weight is [in, out], for each expert if there are any
    experts: int = 0  # 0: one matrix; else A is [E x rank, in], B [out, rank x E] as PEFT keeps them


Term = tuple[float, Tensor, Tensor]
"""Scale, A and B."""


def merge(weight: Tensor, terms: Sequence[Term], shape: AdapterLayout, lengths: Tensor | None = None) -> Tensor:
    """The weight with all terms added; with `lengths` [out], each output's row is scaled to its length (DoRA)."""
    total = weight
    for scale, a, b in terms:
        total = total + scale * _product(a, b, shape)
    if lengths is not None:
        now = torch.linalg.norm(total, dim=0 if shape.turned else 1, keepdim=True)
        total = total * (lengths.view_as(now) / now)
    return total


def _product(a: Tensor, b: Tensor, shape: AdapterLayout) -> Tensor:
    if shape.experts:
        a = a.reshape(shape.experts, -1, a.shape[-1])  # [E, rank, in]
        b = b.reshape(b.shape[0], -1, shape.experts).permute(2, 0, 1)  # [E, out, rank]
    product = b @ a
    return product.transpose(-1, -2) if shape.turned else product
