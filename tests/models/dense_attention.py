"""Attention over a packed row with all scores written out: what the other ways to compute it are compared with."""

import torch
from torch.nn import functional as F

from hone.models.attention.packed import Packing, Scoring

HEADS, KV_HEADS = 8, 4
# Lengths of segments, and their prefixes: shapes that share a kernel call, several tiles, and single tokens.
PACKINGS = {
    "one": ([300], [None]),
    "equal": ([40, 40, 40, 40, 40], [None] * 5),
    "mixed": ([1, 130, 7, 260], [None] * 4),
    "prefixes": ([150, 150, 20, 30, 30, 1, 140], [None, None, None, 1, 0, 2, 0]),
}
SCORINGS = {  # softcap, sinks
    "softcap": (2.0, False),
    "sinks": (None, True),
    "both": (3.0, True),
}


def packing_of(lengths, parents, device=None):
    return Packing.of(F.pad(torch.tensor(lengths).cumsum(0), (1, 0)), parents, device)


def inputs(tokens, dtype, sinks, size=16, value_size=16):
    """Queries, keys, values and, if wanted, sinks; rounded so that bfloat16 has the same."""
    shapes = [(1, tokens, heads, d) for heads, d in ((HEADS, size), (KV_HEADS, size), (KV_HEADS, value_size))]
    made = [torch.randn(shape).bfloat16().transpose(1, 2) for shape in shapes]
    made += [torch.randn(HEADS).bfloat16()] if sinks else []
    return [x.to(dtype).requires_grad_() for x in made]


def visible(lengths, parents, window):
    """[T, T] bool: which keys each query sees."""
    starts = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).tolist()
    seen = torch.zeros(starts[-1], starts[-1], dtype=torch.bool)
    for segment, length in enumerate(lengths):
        before, parent = [], parents[segment]
        if parent is not None:
            before = list(range(starts[parent], starts[parent + 1]))
        own = list(range(starts[segment], starts[segment] + length))
        for i, query in enumerate(own):
            keys = before + own[: i + 1]
            seen[query, keys[-window:] if window else keys] = True
    return seen


def dense(q, k, v, seen, scoring):
    """[1, heads, T, dv]; rounds where transformers' eager attention rounds."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.mT) * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if scoring.sinks is not None:
        column = scoring.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = F.softmax(scores, -1, dtype=torch.promote_types(q.dtype, torch.float32)).to(v.dtype)
    return weights[..., : k.shape[2]] @ v


def outputs_and_gradients(function, tensors, upstream, softcap, window, scale=0.3):
    """The output of `function(q, k, v, scoring)` and the gradients of `tensors`."""
    scoring = Scoring(scale, window, softcap=softcap, sinks=tensors[3] if len(tensors) > 3 else None)
    out = function(*tensors[:3], scoring)
    return [out, *torch.autograd.grad((out * upstream.to(out.dtype)).sum(), tensors)]
