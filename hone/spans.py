"""Spans of a flat axis: sequences of a packed batch, image tokens, segments of shared prefixes.

On a CPU these functions use numpy, which takes a third of torch's time; a batch in the driver has millions of tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def cumulative(lengths: Tensor) -> Tensor:
    """The start of each span and the end of the last: lengths [N] -> offsets [N+1]."""
    return torch.nn.functional.pad(torch.cumsum(lengths, 0), (1, 0))


def repeat(values: Tensor, counts: Tensor) -> Tensor:
    """Repeat each value `count` times: [N] -> [sum of counts]. Differentiable in `values`."""
    plain = values.device.type == "cpu" and values.dtype != torch.bfloat16 and not values.requires_grad
    if plain and counts.device.type == "cpu":
        return torch.from_numpy(np.repeat(values.detach().numpy(), counts.numpy()))
    return torch.repeat_interleave(values, counts)


def ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """The positions start, start + 1 ... of all spans, concatenated: [sum of lengths] int64."""
    shift = repeat(starts - (lengths.cumsum(0) - lengths), lengths)
    return shift.add_(torch.arange(len(shift), device=lengths.device))


def running_sums(rows: Tensor) -> Tensor:
    """The sum of each row's values up to each place: [N, V] -> [N, V]; repeats to the bit where torch has to.

    Where only deterministic kernels are allowed, torch refuses to add up floats on a GPU, because its kernel for a
    single row does not repeat (its issue 75240). The kernel for several rows has a fixed order.
    """
    if not torch.are_deterministic_algorithms_enabled():
        return rows.cumsum(-1)
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        return rows.expand(2, -1).cumsum(-1)[:1] if len(rows) == 1 else rows.cumsum(-1)
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
