"""The two kernels behind `torch.nn.attention.varlen`, written out for a CPU: their callers run here without a GPU.

torch has these kernels only for accelerators. This is what they compute, and what they require of their arguments
according to the documentation of `varlen_attn`, torch's tests of it, and FlashAttention 2 and 3:
https://docs.pytorch.org/docs/stable/nn.attention.varlen.html
https://github.com/pytorch/pytorch/blob/main/test/test_varlen_attention.py
https://github.com/Dao-AILab/flash-attention/blob/main/csrc/flash_attn/flash_api.cpp
https://github.com/Dao-AILab/flash-attention/blob/main/hopper/flash_api.cpp
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hone.models.attention import varlen


@contextmanager
def flash_on_cpu() -> Iterator[list[dict]]:
    """Register the kernels for CPU tensors; yields a list that gets the options of each forward."""
    forwards: list[dict] = []
    library = torch.library.Library("aten", "IMPL")

    def forward(*args, **options):
        forwards.append({"max_k": int(args[6]), **options})
        return _forward(*args, **options)

    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", _backward, "CPU")
    _forget()
    try:
        yield forwards
    finally:
        library._destroy()
        _forget()


@contextmanager
def version_on_cpu(monkeypatch, name: str) -> Iterator[list[dict]]:
    """Have torch know the kernels as a version of FlashAttention, and hone use it, on a device that would have it."""
    forwards: list[dict] = []

    class Activated:
        def __init__(self):
            self.kernels = flash_on_cpu()
            forwards.append(self.kernels.__enter__())

        def remove(self):
            self.kernels.__exit__(None, None, None)

    known = torch.nn.attention._registry._FLASH_ATTENTION_IMPLS
    monkeypatch.setitem(known, name, Activated)
    monkeypatch.setenv(varlen.FLASH_VARIABLE, name)
    monkeypatch.setattr(varlen, "_capability", lambda device: varlen.CACHED.get(name))
    _forget()
    try:
        yield forwards
    finally:
        torch.nn.attention.restore_flash_attention_impl(_raise_warn=False)
        _forget()


def _forget():
    varlen.has_kernel.cache_clear()
    varlen.reads_caches.cache_clear()


def _forward(
    q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None, window_size_left=None,
    window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None, num_splits=None,
):  # fmt: skip
    assert dropout_p == 0.0
    assert not return_debug_mask
    assert alibi_slopes is None
    assert num_splits is None or torch.nn.attention.current_flash_attention_impl() is not None
    _check(q, k, v, cu_q, cu_k, seqused_k, block_table)
    if block_table is None:
        ends = cu_k.tolist()
        keys, values = ([x[a:b] for a, b in itertools.pairwise(ends)] for x in (k, v))
    else:
        keys, values = ([x[pages.long()].flatten(0, 1) for pages in block_table] for x in (k, v))
    if seqused_k is not None:
        keys, values = ([x[:n] for x, n in zip(parts, seqused_k.tolist(), strict=True)] for parts in (keys, values))
    queries = [q[a:b] for a, b in itertools.pairwise(cu_q.tolist())]
    assert max(map(len, queries)) <= max_q
    assert max(map(len, keys)) <= max_k
    right = 0 if is_causal else window_size_right
    found = [_one(*x, scale, window_size_left, right) for x in zip(queries, keys, values, strict=True)]
    out, lse = (torch.cat(parts, dim) for parts, dim in zip(zip(*found, strict=True), (0, 1), strict=True))
    return out.to(q.dtype), lse, torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


def _check(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor | None, used, table) -> None:
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256
    assert q.shape[-1] % 8 == 0
    assert q.shape[-2] % k.shape[-2] == 0
    assert k.shape == v.shape
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    assert all(x is None or (x.dtype == torch.int32 and x.is_contiguous()) for x in (cu_q, cu_k, used, table))
    assert q.dim() == 3
    assert k.dim() == (3 if table is None else 4)
    if table is None:
        assert cu_k is not None
        return
    assert torch.nn.attention.current_flash_attention_impl() in ("FA3", "FA4")  # version 2 has errors with pages
    assert cu_k is None
    assert used is not None
    assert table.shape == (len(cu_q) - 1, table.shape[1])


def _scores(q: Tensor, k: Tensor, scale, left, right) -> tuple[Tensor, float]:
    """Scores of one sequence, whose last query is at its last key: [heads, n, keys]; and their scale."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    distance = torch.arange(k.shape[1]) - (torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1])
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left is not None and left >= 0:
        hidden |= distance < -left
    if right is not None and right >= 0:
        hidden |= distance > right
    return (scale * (q @ k.mT)).masked_fill(hidden, float("-inf")), scale


def _per_head(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """[n, heads, d] each -> [heads, n, d] of queries, and of the keys and values that each query head sees."""
    groups = q.shape[1] // k.shape[1]
    wide = (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))
    return [x.transpose(0, 1).float() for x in wide]


def _one(q: Tensor, k: Tensor, v: Tensor, scale, left, right) -> tuple[Tensor, Tensor]:
    """One sequence: [n, heads, d] -> the same shape, and [heads, n]."""
    q, k, v = _per_head(q, k, v)
    scores, _ = _scores(q, k, scale, left, right)
    return (scores.softmax(-1) @ v).transpose(0, 1), scores.logsumexp(-1)


def _backward(
    grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, rng_state, unused, *, scale=None,
    window_size_left=None, window_size_right=None,
):  # fmt: skip
    assert dropout_p == 0.0
    assert out.shape == grad.shape == q.shape
    assert lse.shape == (q.shape[1], q.shape[0])
    _check(q, k, v, cu_q, cu_k, None, None)
    right = 0 if is_causal else window_size_right
    grads = [torch.zeros(x.shape) for x in (q, k, v)]
    for (a, b), (c, d) in zip(itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()), strict=True):
        queries, keys, values = _per_head(q[a:b], k[c:d], v[c:d])
        scores, factor = _scores(queries, keys, scale, window_size_left, right)
        weights = (scores - lse[:, a:b, None]).exp()
        upstream, result = (x[a:b].transpose(0, 1).float() for x in (grad, out))
        of_scores = weights * (upstream @ values.mT - (upstream * result).sum(-1, keepdim=True)) * factor
        grads[0][a:b] += (of_scores @ keys).transpose(0, 1)
        for total, part in ((grads[1], of_scores.mT @ queries), (grads[2], weights.mT @ upstream)):
            total[c:d] += part.unflatten(0, (k.shape[1], -1)).sum(1).transpose(0, 1)
    return tuple(total.to(q.dtype) for total in grads)
