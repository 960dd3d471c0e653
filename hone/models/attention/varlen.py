"""FlashAttention for rows of different lengths (`torch.nn.attention.varlen`), on devices that have its kernels.

    packed rows   `attend_packed`: every sequence at once, in training and when prompts are read
    a KV cache    `attend_cached`: one query for each row, which is read as far as it is filled and no further

Torch brings version 2. HONE_FLASH_ATTENTION=FA3 (or FA4) chooses a newer one, whose package has to be installed; it is
looked up once in each process, before the first attention.
"""

from __future__ import annotations

import inspect
import os
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hone.config import ConfigError
from hone.platforms.base import current_platform

FLASH_VARIABLE = "HONE_FLASH_ATTENTION"
PAGE = 256  # FlashAttention 2 takes pages of a multiple of so many tokens
_HEAD_SIZES = range(8, 257, 8)
_HALF = (torch.bfloat16, torch.float16)


def fits(dtype: torch.dtype, device: torch.device, key_size: int, value_size: int) -> bool:
    """Whether there is a kernel for heads of these sizes. Raises ConfigError for a version that cannot be used."""
    return dtype in _HALF and key_size == value_size and key_size in _HEAD_SIZES and has_kernel(device.type)


@lru_cache(maxsize=8)
def has_kernel(device: str) -> bool:
    """Whether torch, or a package beside it, has the kernel for this type of device."""
    if chosen := os.environ.get(FLASH_VARIABLE, ""):
        _activate(chosen)
    dispatcher: Any = torch._C
    key = dispatcher._dispatch_key_for_device(device)
    return bool(dispatcher._dispatch_has_kernel_for_dispatch_key("aten::_flash_attention_forward", key))


def _activate(name: str) -> None:
    from torch.nn.attention import activate_flash_attention_impl, list_flash_attention_impls

    known = list_flash_attention_impls()
    if name not in known:
        raise ConfigError(f"{FLASH_VARIABLE}={name}: torch {torch.__version__} knows {', '.join(known) or 'none'}")
    try:
        activate_flash_attention_impl(name)
    except (ImportError, RuntimeError) as error:
        raise ConfigError(f"{FLASH_VARIABLE}={name}: its kernels cannot be loaded ({error})") from error


def reads_caches(device: str) -> bool:
    """Whether `attend_cached` runs on this type of device: not every platform's kernel reads pages, nor older torch's.

    `attend_packed` does wherever `fits` is true.
    """
    from torch.nn.attention.varlen import varlen_attn

    pages = {"block_table", "seqused_k"} <= inspect.signature(varlen_attn).parameters.keys()
    platform = current_platform()
    return pages and platform.device == device and "cached" in platform.attention_kernels


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: tuple[Tensor, Tensor],
    most: tuple[int, int],
    scale: float,
    window: int | None,
) -> Tensor:
    """Causal attention, the last query of a sequence at its last key: q [T, heads, d] -> the same shape.

    k, v [keys, kv_heads, d]; `ends`: where sequences begin and end among queries and keys, [N+1] int32 each; `most`:
    the longest sequence of each. With a window, a query sees so many keys, its own included.
    """
    from torch.nn.attention.varlen import varlen_attn  # a kernel that exists only in builds with an accelerator

    seen = (-1 if window is None else window - 1, 0)
    grouped = q.shape[1] != k.shape[1]
    out = varlen_attn(q, k, v, *ends, *most, scale=scale, window_size=seen, enable_gqa=grouped)
    assert isinstance(out, Tensor)  # without `return_aux` it is the output alone
    return out


def attend_cached(
    q: Tensor, k: Tensor, v: Tensor, filled: Tensor, most: int, scale: float, window: int | None
) -> Tensor:
    """One query for each row of a cache, at its last filled column: q [rows, heads, d] -> the same shape.

    k, v [rows, kv_heads, columns, d], where columns are a multiple of `PAGE`; filled [rows] int32, at most `most`.
    """
    from torch.nn.attention import current_flash_attention_impl
    from torch.nn.attention.varlen import varlen_attn

    rows = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    second = current_flash_attention_impl() is None  # version 2 wants the ends of pages too, and has no `num_splits`
    # Split keys are added up in an order that depends on the other rows.
    splits = 1 if torch.are_deterministic_algorithms_enabled() and not second else None
    out = varlen_attn(
        q,
        k.transpose(1, 2),
        v.transpose(1, 2),
        rows,
        rows * k.shape[2] if second else None,
        1,
        most,
        scale=scale,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
        seqused_k=filled,
        block_table=rows[:-1, None].contiguous(),  # a row of the cache is one page
        num_splits=splits,
    )
    assert isinstance(out, Tensor)
    return out
