"""Attention over packed sequences: no padding, no dense mask, one function for every transformers architecture.

    with packed(cu_seqlens):            # which tokens belong together, for this forward (and its backward)
        model(input_ids[None], position_ids=position_ids[None])
             |-- mask functions  -> `packed_mask`: no mask at all, or the layer's `AttentionWindow`
             `-- attention       -> `packed_attention_forward` -> one kernel call per run of equal lengths

Importing this module registers both under the name `PACKED` in transformers' attention and mask registries, so a model
loaded with `attn_implementation=PACKED` uses them. An attention feature of a model is either supported (scale,
sliding window, score soft-capping, attention sinks, dropout) or an error; none is ignored.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hone.models.attention import flex, varlen
from hone.models.attention.chunks import chunks
from hone.models.attention.explicit import attend_explicitly
from hone.models.attention.indexed import AnyMask, attend_runs
from hone.models.attention.sequence_parallel import SequenceRanks, current_ranks
from hone.models.attention.temperature import SCALES, scaled_by_position
from hone.models.attention.tiled import causal_mask, speeds_up, tiled_attention
from hone.models.transformers_patches import SearchFn, replace_search_for_packed_rows

PACKED = "hone_packed"

# What transformers passes along to an attention function without any effect on its result here: positions are already
# in the rotated queries and keys, and what belongs together comes from `packed`.
_WITHOUT_EFFECT = {
    *("position_ids", "cache_position", "use_cache", "layer_idx", "logits_to_keep", "num_items_in_batch"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
}


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """Stands in for a mask tensor: tokens see themselves and `size - 1` tokens before, or with `chunks` their chunk."""

    size: int
    chunks: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring segments of one shape, which share a kernel call."""

    count: int
    length: int  # tokens of each segment
    prefix: int = 0  # tokens of the shared prefix that each segment sees besides its own
    source: int = 0  # the run that these prefixes are
    rows: Tensor | None = None  # [count] which segment of that run is whose prefix


@dataclass(frozen=True, slots=True)
class Packing:
    """Bounds of each segment of a packed row, and the keys that it sees, in the forms that the kernels want.

    A segment is a sequence, or the rest of one whose beginning (its prefix, a segment of its own earlier in the row) is
    shared with others: n answers to one question need the question's tokens once.
    """

    cu_seqlens: Tensor  # [N+1] int32, on the device of the batch
    lengths: tuple[int, ...]
    runs: tuple[Run, ...]
    cu_keys: Tensor  # [N+1] int32: the same where each segment is preceded by its prefix; `cu_seqlens` if none has one
    parents: tuple[int | None, ...]  # of each segment: the segment that is its prefix
    ranks: SequenceRanks | None = None  # who shares the row; each has a slice of its tokens
    masks: dict[int | None, BlockMask] = field(init=False, repr=False, compare=False, default_factory=dict)  # by window
    layouts: dict[str, Any] = field(init=False, repr=False, compare=False, default_factory=dict)  # that layers share

    @classmethod
    def of(
        cls, cu_seqlens: Tensor, parents: Sequence[int | None] | None = None, device: torch.device | None = None
    ) -> Packing:
        """`parents[i]` is the segment that is segment i's prefix, or None; segments of equal length lie side by side.

        `device` is the row's, None: that of `cu_seqlens`, whose values are read here, so keep it in host memory.
        Raises ValueError unless `cu_seqlens` starts at 0 and increases, and prefixes come first and have none.
        """
        ends = [int(end) for end in cu_seqlens.tolist()]
        lengths = tuple(b - a for a, b in itertools.pairwise(ends))
        if not lengths or ends[0] != 0 or min(lengths) < 1:
            raise ValueError(f"cu_seqlens should start at 0 and increase, found {ends[:8]}{'...' * (len(ends) > 8)}")
        parents = parents or [None] * len(lengths)
        device = cu_seqlens.device if device is None else device
        placed = cu_seqlens.to(device, torch.int32, non_blocking=True)
        runs, cu_keys = _runs(lengths, parents, device), placed
        if any(run.prefix for run in runs):  # once for all layers: each copy to a device waits for it
            seen = (run.prefix + run.length for run in runs for _ in range(run.count))
            cu_keys = torch.tensor([*itertools.accumulate(seen, initial=0)], dtype=torch.int32, device=device)
        return cls(placed, lengths, runs, cu_keys, tuple(parents), current_ranks())

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def in_chunks(self, size: int) -> Packing:
        """The same tokens with a segment for each chunk of `size` tokens of a sequence."""
        if (key := f"chunks of {size}") not in self.layouts:
            ends, parents = chunks(self.lengths, self.parents, size)
            with torch.inference_mode(False):  # as for `masks`
                self.layouts[key] = Packing.of(torch.tensor(ends), parents, self.cu_seqlens.device)
        found: Packing = self.layouts[key]
        return found


def _runs(lengths: Sequence[int], parents: Sequence[int | None], device: torch.device) -> tuple[Run, ...]:
    runs: list[Run] = []
    place: dict[int, tuple[int, int]] = {}  # segment without a prefix -> (its run, its position there)

    def shape(segment: int) -> tuple[int, int, int]:
        parent = parents[segment]
        if parent is None:
            return lengths[segment], 0, 0
        if parent not in place:
            raise ValueError(f"segment {segment} has prefix {parent}, which should come before it and have no prefix")
        return lengths[segment], lengths[parent], place[parent][0]

    segment = 0
    while segment < len(lengths):
        length, prefix, source = shape(segment)
        members = [segment]
        if not prefix:
            place[segment] = (len(runs), 0)
        while segment + len(members) < len(lengths) and shape(segment + len(members)) == (length, prefix, source):
            if not prefix:
                place[segment + len(members)] = (len(runs), len(members))
            members.append(segment + len(members))
        of = [place[parent][1] for member in members if (parent := parents[member]) is not None]
        rows = torch.tensor(of, device=device) if prefix else None
        runs.append(Run(len(members), length, prefix, source, rows))
        segment += len(members)
    return tuple(runs)


_CURRENT: ContextVar[Packing | None] = ContextVar("hone_packing", default=None)


@contextmanager
def packed(cu_seqlens: Tensor | Packing) -> Iterator[Packing]:
    """Restrict attention in this context to the sequences of `cu_seqlens` ([N+1], starting at 0)."""
    packing = cu_seqlens if isinstance(cu_seqlens, Packing) else Packing.of(cu_seqlens)
    token = _CURRENT.set(packing)
    try:
        yield packing
    finally:
        _CURRENT.reset(token)


def longest_sequence() -> int:
    """Tokens of the longest sequence of the current forward; 0 outside of `packed`."""
    packing = _CURRENT.get()
    return 0 if packing is None else max(run.prefix + run.length for run in packing.runs)


def current_packing() -> Packing | None:
    """The packing of the current forward; None outside of `packed`."""
    return _CURRENT.get()


def checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The `context_fn` for `torch.utils.checkpoint`: recomputation, in whatever thread, sees the forward's packing."""
    return packed(_current()), packed(_current())


def _current() -> Packing:
    packing = _CURRENT.get()
    if packing is None:
        raise RuntimeError(f"a model with attention {PACKED!r} has to be called inside `with packed(cu_seqlens):`")
    return packing


# --------------------------------------------------------------------------------------------- the attention itself


@dataclass(frozen=True, slots=True)
class Scoring:
    """Changes that an architecture makes to its attention scores."""

    scale: float
    window: int | None = None
    chunk: int | None = None
    dropout: float = 0.0
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap) (Gemma 2)
    sinks: Tensor | None = None  # [heads]: one more score per head that takes weight and gives nothing (gpt-oss)
    chosen: Sequence[Tensor] | None = None  # the keys that an indexer chose, for each run; see `indexed`

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.sinks is None and self.chosen is None


def attend(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scoring: Scoring) -> Tensor:
    """Causal attention within each packed sequence, with an architecture's scoring.

    q [1, heads, T, d], k [1, kv_heads, T, d], v [1, kv_heads, T, dv] as transformers has them -> [1, heads, T, dv].
    Raises ValueError on shapes that do not fit.
    """
    if q.shape[0] != 1 or q.shape[2] != packing.num_tokens or k.shape[2] != packing.num_tokens:
        raise ValueError(
            f"packed attention wants one row of {packing.num_tokens} tokens, found queries {tuple(q.shape)} and "
            f"keys {tuple(k.shape)} (KV caches are not supported here)"
        )
    if scoring.chunk is not None:
        return attend(q, k, v, packing.in_chunks(scoring.chunk), replace(scoring, chunk=None))
    if not scoring.plain and scoring.chosen is None and scoring.dropout == 0.0 and flex.fits(q, v):
        return flex_rows(q, k, v, packing, scoring)
    if scoring.plain and scoring.dropout == 0.0 and varlen.fits(q.dtype, q.device, q.shape[-1], v.shape[-1]):
        return _flash_varlen(q, k, v, packing, scoring)
    parts = _parts(q, k, v, packing)
    if scoring.chosen is None:
        outputs = [attend_rows(*part, scoring) for part in parts]
    else:
        outputs = attend_runs(parts, packing, scoring)
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1))[None]


def _parts(q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Queries of each run, and the keys and values that they see: [count, heads, tokens, d]."""
    sizes = [run.count * run.length for run in packing.runs]
    queries, keys, values = (torch.split(x[0], sizes, 1) for x in (q, k, v))
    return [
        (_rows(one_q, run), _seen(keys, index, run), _seen(values, index, run))
        for index, (one_q, run) in enumerate(zip(queries, packing.runs, strict=True))
    ]


def _rows(part: Tensor, run: Run) -> Tensor:
    """[heads, count * length, d] -> [count, heads, length, d], a view."""
    return part.view(part.shape[0], run.count, run.length, part.shape[2]).transpose(0, 1)


def _seen(parts: Sequence[Tensor], index: int, run: Run) -> Tensor:
    """Keys or values of a run's segments, each after the rows of its prefix: [count, heads, prefix + length, d]."""
    own = _rows(parts[index], run)
    if run.rows is None:
        return own
    whole = parts[run.source]
    prefixes = whole.transpose(0, 1).reshape(-1, run.prefix, *whole.shape[::2])  # [segments, prefix, heads, d]
    return torch.cat([prefixes.index_select(0, run.rows), own.transpose(1, 2)], 1).transpose(1, 2)


def attend_rows(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """Causal attention of [count, heads, length, d] over keys [count, kv_heads, n, d]: the queries are the last ones.

    Returns [heads, count * length, dv].
    """
    if scoring.plain:
        out = _sdpa(q, k, v, scoring)
    elif scoring.dropout > 0.0:
        out = attend_explicitly(q, k, v, scoring)
    else:
        out = tiled_attention(q, k, v, scoring.scale, scoring.window, scoring.softcap, scoring.sinks)
    return out.transpose(0, 1).flatten(1, 2)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    if scoring.dropout == 0.0 and speeds_up(q, k, v):
        return tiled_attention(q, k, v, scoring.scale, scoring.window)
    mask = causal_mask(q.shape[2], k.shape[2], scoring.window, q.device)
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


def flex_rows(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scoring: Scoring) -> Tensor:
    """`attend` by torch's flex attention. All layers with one window share a block mask."""
    if scoring.window not in packing.masks:
        with torch.inference_mode(False):  # a training forward may use the mask after an inference forward made it
            packing.masks[scoring.window] = flex.block_mask(*flex.ranges(packing.runs, scoring.window, q.device))
    return flex.flex_packed(q, k, v, packing.masks[scoring.window], scoring.scale, scoring.softcap, scoring.sinks)


def _flash_varlen(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scoring: Scoring) -> Tensor:
    keys, values = k[0].transpose(0, 1), v[0].transpose(0, 1)
    if packing.cu_keys is not packing.cu_seqlens:
        parts = _parts(q, k, v, packing)
        keys, values = (torch.cat([part[i].transpose(1, 2).flatten(0, 1) for part in parts]) for i in (1, 2))
    ends = packing.cu_seqlens, packing.cu_keys
    most = max(packing.lengths), max(run.prefix + run.length for run in packing.runs)
    out = varlen.attend_packed(q[0].transpose(0, 1), keys, values, ends, most, scoring.scale, scoring.window)
    return out.transpose(0, 1)[None]


# ------------------------------------------------------------------------------------------- seen from transformers


def packed_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: AttentionWindow | AnyMask | Tensor | None,
    scaling: float | None = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls: returns [1, T, heads, dv] and no weights.

    Raises NotImplementedError for an attention feature that is not supported.
    """
    scoring = Scoring(
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=window_of(attention_mask, asked.pop("sliding_window", None)),
        chunk=chunk_of(attention_mask),
        dropout=asked.pop("dropout", 0.0),
        softcap=asked.pop("softcap", None),
        sinks=asked.pop("s_aux", None),
        chosen=asked.pop("indices", None),
    )
    if asked.pop("is_causal", None) is False or not getattr(module, "is_causal", True):
        raise NotImplementedError(f"{type(module).__name__} is not causal; packed attention is for causal models")
    strange = [name for name, value in asked.items() if value is not None and name not in _WITHOUT_EFFECT]
    if strange:
        raise NotImplementedError(f"{type(module).__name__} asks for {strange} in its attention: not supported")
    packing = _current()
    if getattr(module, SCALES, False):
        query = scaled_by_position(module, query)
    if packing.ranks is None:
        return attend(query, key, value, packing, scoring).transpose(1, 2).contiguous(), None  # some models view it
    if scoring.sinks is not None:  # one for each head: keep the heads that this rank has in attention
        scoring = replace(scoring, sinks=scoring.sinks.chunk(packing.ranks.size)[packing.ranks.rank])
    query, key, value = (packing.ranks.to_heads(x, packing.num_tokens) for x in (query, key, value))
    out = packing.ranks.to_tokens(attend(query, key, value, packing, scoring))
    return out.transpose(1, 2).contiguous(), None


def chunk_of(mask: AttentionWindow | AnyMask | Tensor | None) -> int | None:
    """The size of the layer's chunks, if it has any."""
    return mask.size if isinstance(mask, AttentionWindow) and mask.chunks else None


def window_of(mask: AttentionWindow | AnyMask | Tensor | None, argument: int | None) -> int | None:
    """The layer's window: some architectures say it by their mask, some by an argument, most by both."""
    if isinstance(mask, AnyMask):
        return None
    if isinstance(mask, Tensor):
        raise NotImplementedError("packed attention takes no mask tensor; sequences are marked off by `packed`")
    if mask is not None and mask.chunks:
        return None
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
) -> AttentionWindow | AnyMask | None:
    """The mask function that transformers calls: None for causal attention, `AttentionWindow` for others."""
    if attention_mask is not None or q_length != kv_length:
        raise NotImplementedError("packed attention has no padding mask and no KV cache: pass neither")
    if use_vmap:
        raise NotImplementedError("this architecture draws its own attention mask, which packed attention cannot")
    if "indexed_attention" in (getattr(config, "layer_types", None) or ()):
        return AnyMask()
    if local_size is None:
        return None
    return AttentionWindow(local_size, chunks=getattr(config, "attention_chunk_size", None) == local_size)


def _without_search(search: SearchFn) -> SearchFn:
    def find(position_ids: Tensor) -> Tensor | None:
        return search(position_ids) if _CURRENT.get() is None else None

    return find


replace_search_for_packed_rows(_without_search)
ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention_forward)
ALL_MASK_ATTENTION_FUNCTIONS.register(PACKED, packed_mask)
