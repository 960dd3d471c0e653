"""Matrix products on a CPU: for each dtype the fastest way that this processor has, measured once per process.

    float32              torch's own: MKL, which takes a slow path on processors that are not Intel's
                      or oneDNN's
    bfloat16, float16    torch's own: oneDNN where the processor multiplies the dtype, else a loop of scalars
                      or float32's, rounded once: what a native product does, which adds up in float32, too

A way is installed below autograd, as torch's kernel for the CPU of `mm`, `addmm`, `bmm`, `baddbmm` and grouped
products. So it serves every layer in both directions, and nothing above has to know of it. Of products that write into
a tensor of their caller, `mm` has it, which compiled layers call; the others stay torch's.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hone.config import ConfigError

VARIABLE = "HONE_CPU_PRODUCTS"  # environment variable: ways, separated by commas; other dtypes have torch's
CHOICE_FILE = ".products"  # in a run folder: what its first launch chose
TORCH, ONEDNN, FLOAT32 = "torch", "onednn", "float32"
_BESIDES = {torch.float32: ONEDNN, torch.bfloat16: FLOAT32, torch.float16: FLOAT32}
_WORTH = 1.5  # times as fast as torch's own; a wide margin, so that all processes of a run choose the same
_FEW = 2  # rows; for so few, reading the weights is all the work, and rounded ones are half as long
_WIDEST = 1 << 24  # numbers of an operand that are held in float32 at a time; 64 MiB

# oneDNN keeps a compiled product for each shape, up to 1,024 of them, and so does torch's interface to it. A run has a
# new shape with almost every micro-batch, and a step has a few dozen.
_KEPT = dict.fromkeys(("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"), "64")

_chosen: dict[torch.dtype, str] = {}
_own: dict[str, Any] = {}  # name of an operation -> torch's kernel, for those that were replaced
_library: list[torch.library.Library] = []  # what is registered lives as long as its library
_settled: set[str] = set()  # values of the variable that `settle` has set


def prepare(dtype: torch.dtype, device: str = "cpu") -> str:
    """Choose how this process computes products of a dtype, unless it did before; the name of the way.

    Whoever computes calls it first. Other devices than a CPU have torch's way alone.
    Raises ConfigError if `HONE_CPU_PRODUCTS` names another way than there is.
    """
    if device != "cpu":
        return TORCH
    if dtype not in _chosen:
        for variable, shapes in _KEPT.items():
            os.environ.setdefault(variable, shapes)  # both are read with the first product
        _chosen[dtype] = _choose(dtype)
        if _chosen[dtype] != TORCH:
            _install()
    return _chosen[dtype]


def settle(file: Path, device: str = "cpu") -> None:
    """Choose for a run and the processes that it starts as its first launch did, which `file` remembers.

    A trial on a busy machine may end otherwise, and then a run that continues would not repeat to the bit. A way that
    the user forces comes first. Raises ConfigError as `prepare` does.
    """
    if device != "cpu":
        return
    value = os.environ.get(VARIABLE, "")
    forced = "" if value in _settled else value
    if not forced:
        os.environ.pop(VARIABLE, None)  # of another run of this process
        _chosen.clear()
    kept = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
    chosen = forced or kept or ",".join(sorted({prepare(torch.float32), prepare(torch.bfloat16)} - {TORCH})) or TORCH
    _ways_in(chosen, VARIABLE if forced else str(file))
    if not kept:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(chosen, encoding="utf-8")
    if not forced:
        _settled.add(chosen)
    os.environ[VARIABLE] = chosen
    _chosen.clear()


def described(dtype: torch.dtype) -> str:
    """The way of `prepare`, for a person."""
    by = {
        TORCH: "torch",
        ONEDNN: "oneDNN, which is faster here than the library that torch takes",
        FLOAT32: "float32's, rounded once, which is faster here than torch's own",
    }[prepare(dtype)]
    return f"{by}; {VARIABLE}={TORCH} forces torch's" if prepare(dtype) != TORCH else by


def _choose(dtype: torch.dtype) -> str:
    besides, wanted = _BESIDES.get(dtype, TORCH), _ways_in(os.environ.get(VARIABLE, ""), VARIABLE)
    if wanted or besides == TORCH:
        return besides if besides in wanted else TORCH
    if besides == ONEDNN and not torch.backends.mkldnn.is_available():
        return TORCH
    rows = 256 if dtype == torch.float32 else 32  # a loop of scalars takes 20 ms for it
    a, b = torch.ones(rows, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the time of this thread is that of the product
    try:
        with torch.inference_mode():
            ours, theirs = (_seconds(way, a, b) for way in (_WAYS[besides], torch.mm))
    finally:
        torch.set_num_threads(threads)
    return besides if theirs > _WORTH * ours else TORCH


def _ways_in(text: str, source: str) -> list[str]:
    ways = [one.strip() for one in text.split(",") if one.strip()]
    for way in ways:
        if way not in (TORCH, ONEDNN, FLOAT32):
            raise ConfigError(f"{source}={way}: choose {TORCH}, {ONEDNN} or {FLOAT32}, or leave it out")
    return ways


def _seconds(product: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> float:
    """Processor time of this thread for one product: the least of a few."""
    found = []
    for _ in range(4):
        before = time.thread_time()
        product(a, b)
        found.append(time.thread_time() - before)
    return min(found)


def _install() -> None:
    """Replace torch's kernels by `_mm` and its like; what they do not compute themselves they leave to torch's."""
    if _library:
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*previously registered kernel")
        for name, kernel in _KERNELS.items():
            _own[name] = torch.library.get_kernel(f"aten::{name}", "CPU")
            library.impl(name, kernel, "CPU", with_keyset=True)
    _library.append(library)


def _torch_s(name: str, *arguments: Any, **options: Any) -> Tensor:
    found: Tensor = _own[name].call_boxed(*arguments, **options)
    return found


def _way(a: Tensor, b: Tensor) -> str:
    return _chosen.get(a.dtype, TORCH) if a.dtype == b.dtype and a.numel() and b.numel() else TORCH


def _mm(keys: Any, a: Tensor, b: Tensor) -> Tensor:
    way = _way(a, b)
    if way == TORCH or (way == FLOAT32 and a.shape[0] <= _FEW):
        return _torch_s("mm", keys, a, b)
    return _WAYS[way](a, b)


def _addmm(keys: Any, added: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    way = _way(a, b)
    if way == TORCH or beta != 1 or alpha != 1 or (way == FLOAT32 and a.shape[0] <= _FEW):
        return _torch_s("addmm", keys, added, a, b, beta=beta, alpha=alpha)
    if way == ONEDNN:
        return _onednn(a, b).add_(added)
    return _in_blocks(a, b, lambda left, right, at: torch.addmm(_columns(added, at), left, right))


def _mm_out(keys: Any, a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """Product into a tensor of the caller, which compiled layers ask for."""
    if _way(a, b) == TORCH or out.dtype != a.dtype:
        return _torch_s("mm.out", keys, a, b, out=out)
    return out.resize_(a.shape[0], b.shape[1]).copy_(_mm(keys, a, b))


def _bmm(keys: Any, a: Tensor, b: Tensor) -> Tensor:
    if _way(a, b) != FLOAT32:
        return _torch_s("bmm", keys, a, b)
    return torch.bmm(a.float(), b.float()).to(a.dtype)


def _baddbmm(keys: Any, added: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if _way(a, b) != FLOAT32:
        return _torch_s("baddbmm", keys, added, a, b, beta=beta, alpha=alpha)
    return torch.baddbmm(added.float(), a.float(), b.float(), beta=beta, alpha=alpha).to(a.dtype)


def _grouped_mm(keys: Any, a: Tensor, b: Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Tensor:
    if _way(a, b) != FLOAT32 or bias is not None:
        return _torch_s("_grouped_mm", keys, a, b, offs, bias, out_dtype)
    return torch._grouped_mm(a.float(), b.float(), offs).to(out_dtype or a.dtype)


def _onednn(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k] @ b [k, n] by oneDNN, as the linear layer whose weight is b transposed."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return found


def _rounded(a: Tensor, b: Tensor) -> Tensor:
    return _in_blocks(a, b, lambda left, right, _: torch.mm(left, right))


def _in_blocks(a: Tensor, b: Tensor, product: Callable[[Tensor, Tensor, slice], Tensor]) -> Tensor:
    """The product in float32 of a [m, k] and b [k, n], some columns of b at a time, rounded to a's dtype."""
    wide, columns = a.float(), max(1, _WIDEST // b.shape[0])
    if columns >= b.shape[1]:
        return product(wide, b.float(), slice(None)).to(a.dtype)
    found = a.new_empty(a.shape[0], b.shape[1])
    for start in range(0, b.shape[1], columns):
        at = slice(start, start + columns)
        found[:, at] = product(wide, b[:, at].float(), at)
    return found


def _columns(added: Tensor, at: slice) -> Tensor:
    """Some columns of what is added to a product, in float32: of a bias, a column, a matrix or a number."""
    whole = added.dim() == 0 or added.shape[-1] == 1
    return (added if whole else added[..., at]).float()


_WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {ONEDNN: _onednn, FLOAT32: _rounded}
_KERNELS = {"mm": _mm, "mm.out": _mm_out, "addmm": _addmm, "bmm": _bmm, "baddbmm": _baddbmm, "_grouped_mm": _grouped_mm}

__all__ = ["CHOICE_FILE", "VARIABLE", "described", "prepare", "settle"]
