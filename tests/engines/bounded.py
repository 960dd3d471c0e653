"""Kernels that take the bounds of a packed row, put where layers with a state call transformers' operations."""

import importlib
from collections import Counter

import torch

KERNELS = {
    "qwen3_5_text": ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"),
    "nemotron_h": ("causal_conv1d_fn", "mamba2_chunk_scan"),
    "lfm2": ("causal_conv1d_fn",),
}


def kernel_of(torch_function, honours):
    """A kernel that runs transformers' operations on each sequence (`honours`) or on all; its calls with bounds."""
    time = 2 if torch_function.__name__ == "causal_conv1d_fn" else 1  # dimension of tokens

    def kernel(*tensors, seq_idx=None, cu_seqlens=None, **settings):
        bounded = seq_idx is not None or cu_seqlens is not None
        calls[torch_function.__name__] += bounded
        if not (honours and bounded):
            return torch_function(*tensors, **settings)
        lengths = torch.bincount(seq_idx[0]) if cu_seqlens is None else cu_seqlens.diff()
        rows = int(lengths.sum())
        parts = []
        for end, length in zip(lengths.cumsum(0).tolist(), lengths.tolist(), strict=True):

            def own(one, start=end - length, length=length):
                of_tokens = isinstance(one, torch.Tensor) and one.dim() > time and one.shape[time] == rows
                return one.narrow(time, start, length) if of_tokens else one

            parts.append(torch_function(*map(own, tensors), **{name: own(one) for name, one in settings.items()}))
        whole = torch.cat([part[0] if isinstance(part, tuple) else part for part in parts], time)
        return (whole, None) if isinstance(parts[0], tuple) else whole

    calls = Counter()
    return kernel, calls


def plant(architecture, monkeypatch, deaf="", kernels=None):
    """Plant kernels of an architecture, by default all; `deaf` ignores bounds. Return how often each got bounds."""
    path = architecture.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{path}.modeling_{path}")
    planted = {name: kernel_of(getattr(module, name), name != deaf) for name in kernels or KERNELS[architecture]}
    for name, (kernel, _) in planted.items():
        monkeypatch.setattr(module, name, kernel)
    return [calls for _, calls in planted.values()]
