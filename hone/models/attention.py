"""Attention over packed sequences: no padding, no dense mask, one function for every transformers architecture.

    with packed(cu_seqlens):            # which tokens belong together, for this forward (and its backward)
        model(input_ids[None], position_ids=position_ids[None])
             |-- mask functions  -> `packed_mask`: no mask at all, or the layer's `Window`
             `-- attention       -> `packed_attention_forward` -> one kernel call per run of equal lengths

Importing this module registers both under the name `PACKED` in transformers' attention and mask registries, so a model
loaded with `attn_implementation=PACKED` uses them. What a model asks of its attention is either done (scale, sliding
window, score soft-capping, attention sinks, dropout) or refused with an error; nothing is dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hone.models import cpu_attention
from hone.models.cpu_attention import band

PACKED = "hone_packed"

# What transformers passes along to an attention function without any effect on its result here: positions are already
# in the rotated queries and keys, and what belongs together comes from `packed`.
_WITHOUT_EFFECT = {
    *("position_ids", "cache_position", "use_cache", "layer_idx", "logits_to_keep", "num_items_in_batch"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
}


@dataclass(frozen=True, slots=True)
class Window:
    """Stands in for a mask tensor: this layer's tokens see themselves and `size - 1` tokens before."""

    size: int


@dataclass(frozen=True, slots=True)
class Packing:
    """Where each sequence of a packed row begins and ends, in the forms that the kernels want."""

    cu_seqlens: Tensor  # [N+1] int32, on the device of the batch
    lengths: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]  # (how many, length): neighbours of equal length share one kernel call

    @classmethod
    def of(cls, cu_seqlens: Tensor) -> Packing:
        """Raises ValueError unless `cu_seqlens` starts at 0 and increases."""
        ends = [int(end) for end in cu_seqlens.tolist()]
        lengths = tuple(b - a for a, b in itertools.pairwise(ends))
        if not lengths or ends[0] != 0 or min(lengths) < 1:
            raise ValueError(f"cu_seqlens should start at 0 and increase, found {ends[:8]}{'...' * (len(ends) > 8)}")
        runs = tuple((len(list(same)), length) for length, same in itertools.groupby(lengths))
        return cls(cu_seqlens.to(torch.int32), lengths, runs)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


_CURRENT: ContextVar[Packing | None] = ContextVar("hone_packing", default=None)


@contextmanager
def packed(cu_seqlens: Tensor | Packing) -> Iterator[Packing]:
    """Attention inside this context is within the sequences that `cu_seqlens` ([N+1], starting at 0) marks off."""
    packing = cu_seqlens if isinstance(cu_seqlens, Packing) else Packing.of(cu_seqlens)
    token = _CURRENT.set(packing)
    try:
        yield packing
    finally:
        _CURRENT.reset(token)


def checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The `context_fn` for `torch.utils.checkpoint`: recomputation, in whatever thread, sees the forward's packing."""
    return packed(_current()), packed(_current())


def _current() -> Packing:
    packing = _CURRENT.get()
    if packing is None:
        raise RuntimeError(f"a model with attention {PACKED!r} has to be called inside `with packed(cu_seqlens):`")
    return packing


# --------------------------------------------------------------------------------------------- the attention itself


def packed_sdpa(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | Packing, scale: float | None = None, window: int | None = None
) -> Tensor:
    """Causal attention within each packed sequence.

    q [1, heads, T, d], k [1, kv_heads, T, d], v [1, kv_heads, T, dv] as transformers lays them out; cu_seqlens [N+1];
    scale defaults to d**-0.5; with `window`, a token sees itself and `window - 1` tokens before. Returns
    [1, heads, T, dv].
    """
    packing = cu_seqlens if isinstance(cu_seqlens, Packing) else Packing.of(cu_seqlens)
    return attend(q, k, v, packing, Scoring(scale=scale if scale is not None else q.shape[-1] ** -0.5, window=window))


@dataclass(frozen=True, slots=True)
class Scoring:
    """What an architecture does to its attention scores."""

    scale: float
    window: int | None = None
    dropout: float = 0.0
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap) (Gemma 2)
    sinks: Tensor | None = None  # [heads]: one more score per head that takes weight and gives nothing (gpt-oss)

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.sinks is None


def attend(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scoring: Scoring) -> Tensor:
    """`packed_sdpa` with everything an architecture may ask for. Raises ValueError on shapes that do not fit."""
    if q.shape[0] != 1 or q.shape[2] != packing.num_tokens or k.shape[2] != packing.num_tokens:
        raise ValueError(
            f"packed attention wants one row of {packing.num_tokens} tokens, found queries {tuple(q.shape)} and "
            f"keys {tuple(k.shape)} (KV caches are not supported here)"
        )
    if _flash_varlen_fits(q, v, scoring):
        return _flash_varlen(q, k, v, packing, scoring)
    sizes = [count * length for count, length in packing.runs]
    queries, keys, values = (torch.split(x[0], sizes, 1) for x in (q, k, v))
    outputs = [_attend_run(*qkv, scoring) for qkv in zip(queries, keys, values, packing.runs, strict=True)]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1))[None]


def _attend_run(q: Tensor, k: Tensor, v: Tensor, run: tuple[int, int], scoring: Scoring) -> Tensor:
    """[heads, count * length, d] -> [heads, count * length, dv], as a batch of `count` rows (views, no copies)."""
    q, k, v = (x.view(x.shape[0], *run, x.shape[2]).transpose(0, 1) for x in (q, k, v))
    out = _sdpa(q, k, v, scoring) if scoring.plain else _explicit(q, k, v, scoring)
    return out.transpose(0, 1).flatten(1, 2)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    if scoring.dropout == 0.0 and cpu_attention.fits(q, k, v):
        return cpu_attention.causal_attention(q, k, v, scoring.scale, scoring.window)
    length = q.shape[2]
    mask = None if scoring.window is None or length <= scoring.window else band(length, scoring.window, q.device)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=scoring.dropout,
        is_causal=mask is None,
        scale=scoring.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _explicit(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """Attention written out, for scores that no kernel computes: [rows, heads, length, length] at once, so slower."""
    rows, heads, length, _ = q.shape
    groups = heads // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.transpose(-1, -2)) * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    scores = scores.masked_fill(~band(length, scoring.window or length, q.device), float("-inf"))
    if scoring.sinks is not None:
        sinks = scoring.sinks.to(scores.dtype).view(1, heads, 1, 1).expand(rows, heads, length, 1)
        scores = torch.cat([scores, sinks], -1)
    weights = F.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype)
    return F.dropout(weights[..., :length], scoring.dropout) @ v


def _flash_varlen_fits(q: Tensor, v: Tensor, scoring: Scoring) -> bool:
    """Whether torch's FlashAttention for packed rows has a kernel for this."""
    half = q.dtype in (torch.bfloat16, torch.float16)
    return q.is_cuda and half and scoring.plain and scoring.dropout == 0.0 and q.shape[-1] == v.shape[-1] <= 256


def _flash_varlen(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scoring: Scoring) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # a kernel that exists only in builds with an accelerator

    longest = max(packing.lengths)
    out = varlen_attn(
        q[0].transpose(0, 1),
        k[0].transpose(0, 1),
        v[0].transpose(0, 1),
        packing.cu_seqlens,
        packing.cu_seqlens,
        longest,
        longest,
        scale=scoring.scale,
        window_size=(-1 if scoring.window is None else scoring.window - 1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(out, Tensor)  # without `return_aux` it is the output alone
    return out.transpose(0, 1)[None]


# ------------------------------------------------------------------------------------------- seen from transformers


def packed_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Window | Tensor | None,
    scaling: float | None = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls: returns [1, T, heads, dv] and no weights.

    Raises NotImplementedError for anything that an architecture asks for and this function does not know.
    """
    scoring = Scoring(
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=_window(attention_mask, asked.pop("sliding_window", None)),
        dropout=asked.pop("dropout", 0.0),
        softcap=asked.pop("softcap", None),
        sinks=asked.pop("s_aux", None),
    )
    if asked.pop("is_causal", None) is False or not getattr(module, "is_causal", True):
        raise NotImplementedError(f"{type(module).__name__} is not causal; packed attention is for causal models")
    strange = [name for name, value in asked.items() if value is not None and name not in _WITHOUT_EFFECT]
    if strange:
        raise NotImplementedError(f"{type(module).__name__} asks for {strange} in its attention: not supported")
    return attend(query, key, value, _current(), scoring).transpose(1, 2), None


def _window(mask: Window | Tensor | None, argument: int | None) -> int | None:
    """The layer's window: some architectures say it by their mask, some by an argument, most by both."""
    if isinstance(mask, Tensor):
        raise NotImplementedError("packed attention takes no mask tensor; sequences are marked off by `packed`")
    if mask is not None and argument is not None and mask.size != argument:
        raise ValueError(f"the mask's window of {mask.size} tokens is not the layer's of {argument}")
    return mask.size if mask is not None else argument


def packed_mask(
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    config: Any = None,
    use_vmap: bool = False,
    **_: Any,
) -> Window | None:
    """The mask function that transformers calls: None for causal attention, `Window` for a sliding window."""
    if attention_mask is not None or q_length != kv_length:
        raise NotImplementedError("packed attention has no padding mask and no KV cache: pass neither")
    if use_vmap:
        raise NotImplementedError("this architecture draws its own attention mask, which packed attention cannot")
    if local_size is None:
        return None
    if getattr(config, "attention_chunk_size", None) == local_size:
        raise NotImplementedError(f"chunked attention (attention_chunk_size={local_size}) is not supported")
    return Window(local_size)


ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention_forward)
ALL_MASK_ATTENTION_FUNCTIONS.register(PACKED, packed_mask)
