"""FlashAttention for rows of different lengths (`torch.nn.attention.varlen`), on devices that have its kernels.

    packed rows   `attend_packed`: every sequence at once, in training and when prompts are read
    a KV cache    `attend_cached`: one query for each row, which is read as far as it is filled (versions 3 and 4)

torch brings version 2. HONE_FLASH_ATTENTION=FA3 or FA4 activates another, from an installed package, at the first
attention of a process; torch then uses it for `scaled_dot_product_attention` too. Version 2 reads pages as well, but
splits them with wrong results for some shapes (https://github.com/pytorch/pytorch/issues/194167), so it gets none.
"""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from hone.config import ConfigError

FLASH_VARIABLE = "HONE_FLASH_ATTENTION"
CAPABILITIES = {"FA3": (9,), "FA4": (9, 10)}  # major compute capabilities that each version has kernels for
CACHED = {"FA3": 9, "FA4": 10}  # and the one for which it reads pages: torch 2.13, nn/attention/_fa3.py and _fa4.py
TOLERANCE = 0.02  # of the first use of `attend_cached`, as a share of the largest value
_HEAD_SIZES = range(8, 257, 8)
_HALF = (torch.bfloat16, torch.float16)
_KNOWN = inspect.signature(varlen_attn).parameters  # torch 2.11 has neither of these two
GROUPED = "enable_gqa" in _KNOWN
PAGES = {"block_table", "seqused_k"} <= _KNOWN.keys()
_CHECKED = ((8, 1), (2, 512), (2, 512))  # heads and tokens of a row's query, keys and values


@dataclass(frozen=True, slots=True)
class CachedRows:
    """Filled length of each row of a KV cache, in the forms that the kernel wants: each row is one page."""

    filled: Tensor  # [rows] int32, at least 1
    ends: Tensor  # [rows + 1] int32: one query for each row
    most: int  # filled columns of a row

    @classmethod
    def of(cls, filled: Tensor, most: int) -> CachedRows:
        return cls(filled.int(), torch.arange(len(filled) + 1, dtype=torch.int32, device=filled.device), most)


def fits(dtype: torch.dtype, device: torch.device, key_size: int, value_size: int) -> bool:
    """Return whether a kernel takes heads of these sizes. Raises ConfigError for a version that cannot be used."""
    return dtype in _HALF and key_size == value_size and key_size in _HEAD_SIZES and has_kernel(device.type)


@lru_cache(maxsize=8)
def has_kernel(device: str) -> bool:
    """Return whether torch or an installed package has the kernel for this type of device."""
    chosen = os.environ.get(FLASH_VARIABLE, "")
    if chosen and not (chosen in CAPABILITIES and _capability(device) is None):  # a CPU in a run on GPUs
        _activate(chosen, device)
    dispatcher: Any = torch._C
    key = dispatcher._dispatch_key_for_device(device)
    return bool(dispatcher._dispatch_has_kernel_for_dispatch_key("aten::_flash_attention_forward", key))


def _activate(name: str, device: str) -> None:
    attention: Any = torch.nn.attention
    known = attention.list_flash_attention_impls() if hasattr(attention, "list_flash_attention_impls") else []
    if name not in known:
        raise ConfigError(f"{FLASH_VARIABLE}={name}: torch {torch.__version__} knows {', '.join(known) or 'none'}")
    needed, found = CAPABILITIES.get(name, ()), _capability(device)
    if needed and found not in needed:
        wanted = " or ".join(f"{major}.x" for major in needed)
        raise ConfigError(f"{FLASH_VARIABLE}={name} needs compute capability {wanted}; this device has {found}.x")
    try:
        attention.activate_flash_attention_impl(name)
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(f"{FLASH_VARIABLE}={name}: its kernels cannot be loaded ({error})") from error


def _capability(device: str) -> int | None:
    """The major compute capability of the current device of a type; None where there is no such number."""
    module: Any = torch.get_device_module(device)
    return int(module.get_device_capability()[0]) if hasattr(module, "get_device_capability") else None


@lru_cache(maxsize=8)
def reads_caches(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `attend_cached` runs where `fits` is true; compares it there with torch's operations once.

    Raises RuntimeError if they differ.
    """
    chosen: Any = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    if not (PAGES and chosen in CACHED and CACHED[chosen] == _capability(device.type)):
        return False
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, heads, n, 64, generator=generator).to(device, dtype) for heads, n in _CHECKED)
    filled = torch.tensor([1, 200, 512], device=device)
    ours = attend_cached(q[:, :, 0], k, v, CachedRows.of(filled, 512), 0.125, None)
    seen = (torch.arange(512, device=device) < filled[:, None])[:, None, None]
    theirs = F.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), attn_mask=seen, scale=0.125, enable_gqa=True
    )
    gap = float((ours.float() - theirs[:, :, 0]).abs().max() / theirs.abs().max())
    if not gap <= TOLERANCE:
        raise RuntimeError(
            f"FlashAttention ({chosen}) over a KV cache differs from torch's operations on {device} by {gap:.3g} of "
            f"the largest value, with torch {torch.__version__}; {TOLERANCE:g} is allowed. Run without {FLASH_VARIABLE}"
        )
    return True


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
    the longest sequence of each. With a window, a query sees the last `window` keys, its own included.
    """
    seen = (-1 if window is None else window - 1, 0)
    grouped: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    if grouped and not GROUPED:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        grouped = {}
    out = varlen_attn(q, k, v, *ends, *most, scale=scale, window_size=seen, **grouped)
    assert isinstance(out, Tensor)  # without `return_aux` it is the output alone
    return out


def attend_cached(q: Tensor, k: Tensor, v: Tensor, rows: CachedRows, scale: float, window: int | None) -> Tensor:
    """One query for each row of a cache, at its last filled column: q [rows, heads, d] -> the same shape.

    k, v [rows, kv_heads, columns, d].
    """
    # How keys are split depends on the other rows, and so does the order in which they are added up.
    splits = 1 if torch.are_deterministic_algorithms_enabled() else None
    out = varlen_attn(
        q,
        k.transpose(1, 2),
        v.transpose(1, 2),
        rows.ends,
        None,
        1,
        rows.most,
        scale=scale,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
        seqused_k=rows.filled,
        block_table=rows.ends[:-1, None].contiguous(),
        num_splits=splits,
    )
    assert isinstance(out, Tensor)
    return out
