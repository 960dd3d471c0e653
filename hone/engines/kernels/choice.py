"""Choice between hone's Triton kernels and PyTorch's operations in this process."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch

from hone.platforms.base import TRITON_INTERPRETER, TRITON_SWITCH, current_platform, why_no_triton

NEVER = () if os.environ.get(TRITON_INTERPRETER) == "1" else ("cpu",)  # device types that Triton does not compile for
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of the products that the kernels read


def kernels_for(device: str, dtype: torch.dtype) -> Any:
    """The module `triton_scores` if it computes with tensors of this device and dtype, else None."""
    return _kernels(device, os.environ.get(TRITON_SWITCH, "")) if dtype in DTYPES else None


@cache
def _kernels(device: str, switch: str) -> Any:
    """Raises RuntimeError if the kernels compute something else than torch here."""
    if device != current_platform().device or why_no_triton(current_platform()):
        return None
    return _checked(device)


def _checked(device: str) -> Any:
    from hone.engines.kernels import triton_scores

    triton_scores.check(device)
    return triton_scores
