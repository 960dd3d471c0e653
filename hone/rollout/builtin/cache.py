"""The KV cache: one row per running sequence, preallocated, addressed by (layer, row, KV head, column).

    keys   [layers, rows, kv_heads, columns, key_size]      column c of a row holds token c of its sequence
    values [layers, rows, kv_heads, columns, value_size]

Layers of one shape share two such tensors; a model whose layers differ (Gemma 4) has two for each shape.
Rows and columns are what the running requests need: the cache grows when they need more (its content is copied) and is
kept between requests until `release`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from hone.data.routes import Routes
from hone.models.attention import varlen
from hone.models.attention.chunks import pieces
from hone.models.attention.explicit import attend_hidden
from hone.models.attention.packed import Packing, Scoring, attend, attend_rows
from hone.models.vision.model import RowImages
from hone.rollout.builtin.prefixes import BLOCK, Prefixes, Root, joined
from hone.rollout.images import PlacedImages, row_of

# Matrix and attention kernels round differently for a few rows, or for odd lengths. Keeping off those paths makes a
# sequence's log-probs the same to the bit whatever else is in the batch (observed on x86; nothing relies on it for
# correctness, only runs that should repeat exactly do).
COLUMN_STEP = 16  # attention looks at a multiple of this many columns
MINIMUM_ROWS = 16  # matrix products have at least so many rows

CacheShapes = tuple["CacheShape", ...]
Addresses = tuple[Tensor, ...]  # of tokens in layers of each shape, as `KVCache.addresses` returns them


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Memory of one token in layers that are alike."""

    layers: int
    kv_heads: int
    key_size: int
    value_size: int
    carries_state: bool = False  # layers have states besides, which have no columns


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """Maximum size of the cache."""

    rows: int
    tokens: int  # rows x columns
    kept_tokens: int = 0  # of ended requests, in addition


@dataclass(frozen=True)
class Step:
    """One decode step: row i of the batch is row i of the cache; the rows beyond `rows` are padding."""

    inputs: Tensor  # [3, max(rows, MINIMUM_ROWS)] int64: rows of `token_ids`, `positions` and `turned`
    rows: int
    columns: int  # of the cache, that attention looks at
    dtype: torch.dtype  # of the cache

    @classmethod
    def of(
        cls, token_ids: NDArray[np.int64], positions: NDArray[np.int64], shift: NDArray[np.int64], cache: KVCache
    ) -> Step:
        """The step in which row i of `cache` reads token i, [rows] each; `shift`: what `turned` is ahead by."""
        rows = len(token_ids)
        inputs = np.zeros((3, max(rows, MINIMUM_ROWS)), np.int64)
        inputs[:, :rows] = token_ids, positions, positions + shift
        columns = min(rounded(int(inputs[1].max()) + 1, COLUMN_STEP), cache.columns)
        return cls(torch.from_numpy(inputs).to(cache.device), rows, columns, cache.dtype)

    @property
    def token_ids(self) -> Tensor:
        """The token that each row reads now."""
        return self.inputs[0]

    @property
    def positions(self) -> Tensor:
        """The column that each row writes now."""
        return self.inputs[1]

    @property
    def turned(self) -> Tensor:
        """Return the positions that turn query and key: ahead of the column after images."""
        return self.inputs[2]

    @cached_property
    def hidden(self) -> Tensor:
        """[rows, 1, 1, columns]: 0 where a row may look, -inf where not."""
        beyond = torch.arange(self.columns, device=self.inputs.device) > self.positions[: self.rows, None]
        hidden = torch.zeros(self.rows, self.columns, dtype=self.dtype, device=self.inputs.device)
        hidden.masked_fill_(beyond, float("-inf"))
        return hidden[:, None, None, :]

    @cached_property
    def filled(self) -> varlen.CachedRows:
        """Return the number of columns that each row may look at."""
        return varlen.CachedRows.of(self.positions[: self.rows] + 1, self.columns)


@dataclass(frozen=True, slots=True)
class PromptRun:
    """Neighbouring prompts of one shape, which share attention calls."""

    rows: Tensor  # [n] int64 of the cache
    start: int  # tokens of each that the cache has
    length: int  # tokens of each that are computed
    in_blocks: bool  # whether KV is kept between requests like these: attention then begins at multiples of BLOCK


@dataclass(frozen=True, slots=True)
class PackedPrompts:
    """Sequences to prefill in one forward, end to end; the tokens beyond `rows` are padding."""

    token_ids: Tensor  # [max(T, MINIMUM_ROWS)] int64
    positions: Tensor  # the same shape; for the first T tokens also the column that each writes
    rows: Tensor  # [T] int64, the row that each token writes
    packing: Packing  # of the tokens, padding as a sequence of its own
    runs: tuple[PromptRun, ...]
    turned: Tensor | None = None  # [max(T, MINIMUM_ROWS), 3] positions of frame, row, column; None: all as `positions`
    images: RowImages | None = None

    @classmethod
    def of(
        cls,
        sequences: list[tuple[int, ...]],
        rows: list[int],
        device: torch.device,
        placed: Sequence[PlacedImages] = (),
        starts: Sequence[int] = (),
        in_blocks: Sequence[bool] = (),
    ) -> PackedPrompts:
        """Pack sequences, each for its row; `placed` has the images of each; empty if none has any.

        `starts`: how many tokens the cache has of each row, multiples of BLOCK; the sequences begin after them.
        `in_blocks`: as `PromptRun.in_blocks`, of each row.
        """
        lengths = [len(sequence) for sequence in sequences]
        starts, in_blocks = starts or [0] * len(lengths), in_blocks or [False] * len(lengths)
        total = sum(lengths)
        padding = [MINIMUM_ROWS - total] if total < MINIMUM_ROWS else []
        spans = lengths + padding
        token_ids = np.fromiter(itertools.chain(*sequences, itertools.repeat(0, sum(padding))), np.int64)
        ends = np.cumsum([0, *spans])
        before = torch.from_numpy(np.repeat(np.array([*starts, *(0 for _ in padding)], np.int64), spans))
        positions = before + torch.from_numpy(np.arange(ends[-1]) - np.repeat(ends[:-1], spans))
        turned, images = row_of(placed, lengths, int(ends[-1]), device) if any(placed) else (None, None)
        return cls(
            token_ids=torch.from_numpy(token_ids).to(device),
            positions=positions.to(device),
            rows=torch.from_numpy(np.repeat(np.array(rows, np.int64), lengths)).to(device),
            packing=Packing.of(torch.from_numpy(ends).to(device)),
            runs=tuple(_runs(list(zip(starts, lengths, in_blocks, rows, strict=True)), device)),
            turned=None if turned is None else turned + before.to(device)[:, None],
            images=images,
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, padding counted as one."""
        return max(MINIMUM_ROWS, *(run.start + run.length for run in self.runs))


def _runs(prompts: Sequence[tuple[int, int, bool, int]], device: torch.device) -> Iterator[PromptRun]:
    """Of each prompt: start, length, whether in blocks, row."""
    for shape, same in itertools.groupby(prompts, lambda one: one[:3]):
        yield PromptRun(torch.tensor([row for *_, row in same], device=device), *shape)


class KVCache:
    """Keys and values of every layer; sized by `reserve`."""

    copies_running = True  # `copy_row` may copy the first columns of a row that has more

    def __init__(self, shapes: CacheShapes, limits: CacheLimits, dtype: torch.dtype, device: torch.device) -> None:
        """Layers are numbered through the shapes: first those of the first shape."""
        self.shapes = shapes
        self._places = [(group, index) for group, one in enumerate(shapes) for index in range(one.layers)]
        self.limits = limits
        self.dtype = dtype
        self.device = device
        # With AMX the kernel repacks keys and values of narrow types for each block of queries but a single one.
        self._head_by_head = device.type == "cpu" and dtype.itemsize == 2 and torch.cpu._is_amx_tile_supported()
        self._in_blocks = device.type == "cpu"
        # A kernel that reads each row as far as it is filled, and takes no mask.
        fits = [varlen.fits(dtype, device, one.key_size, one.value_size) for one in shapes]
        self._ragged = [one and varlen.reads_caches(device, dtype) for one in fits]
        self.prefixes = Prefixes(limits.kept_tokens)
        self.bound: dict[Any, Any] = {}  # what has addresses of this memory, as recorded steps do; gone when it moves
        self.release()

    def release(self) -> None:
        """Give all memory back; the content is lost."""
        self.prefixes.clear()
        self.keys, self.values = self._empty(0, 0)

    @property
    def rows(self) -> int:
        return self.keys[0].shape[1]

    @property
    def columns(self) -> int:
        return self.keys[0].shape[3]

    @property
    def bytes(self) -> int:
        return sum(one.nbytes for one in (*self.keys, *self.values)) + self.prefixes.bytes

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [rows, kv_heads, columns, size]."""
        group, index = self._places[layer]
        return self.keys[group][index], self.values[group][index]

    def reserve(self, rows: int, columns: int, live_rows: int) -> None:
        """Make room for `rows` x `columns`; the content of the first `live_rows` rows is kept.

        It grows by doubling its rows, and never shrinks a dimension, where the limit lets it; while it moves, the old
        and the new content exist side by side.
        """
        if rows <= self.rows and columns <= self.columns:
            return
        wide = max(columns, self.columns)
        roomy = max(rows, self.rows, min(2 * self.rows, self.limits.rows, self.limits.tokens // wide))
        if roomy * wide <= self.limits.tokens:
            rows, columns = roomy, wide
        old_keys, old_values, kept = self.keys, self.values, min(columns, self.columns)
        self.keys, self.values = self._empty(0, 0)
        if not live_rows:
            del old_keys, old_values  # free before the new is taken
            self.keys, self.values = self._empty(rows, columns)
            return
        self.keys, self.values = self._empty(rows, columns)
        for new, old in zip((*self.keys, *self.values), (*old_keys, *old_values), strict=True):
            new[:, :live_rows, :, :kept] = old[:, :live_rows, :, :kept]

    def _empty(self, rows: int, columns: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Zeros, not uninitialised memory: masked columns are multiplied by 0, and 0 x NaN is NaN."""
        self.bound.clear()
        where: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        sizes = [((one.layers, rows, one.kv_heads, columns), one) for one in self.shapes]
        keys = tuple(torch.zeros(*size, one.key_size, **where) for size, one in sizes)
        return keys, tuple(torch.zeros(*size, one.value_size, **where) for size, one in sizes)

    def addresses(self, rows: Tensor, columns: Tensor) -> Addresses:
        """Return the addresses of n tokens by row and column, for `write`: [n * kv_heads] for each shape of layers."""
        found = []
        for one in self.shapes:
            heads = torch.arange(one.kv_heads, device=self.device)
            found.append(((rows[:, None] * one.kv_heads + heads) * self.columns + columns[:, None]).flatten())
        return tuple(found)

    def write(self, layer: int, addresses: Addresses, keys: Tensor, values: Tensor) -> None:
        """Write keys [n, kv_heads, d] and values of n tokens to `addresses`."""
        at = addresses[self._places[layer][0]]
        for stored, new in zip(self.of_layer(layer), (keys, values), strict=True):
            if new.numel():
                stored.view(-1, stored.shape[-1]).index_copy_(0, at, new.reshape(-1, stored.shape[-1]))

    def recall(self, root: Root, tokens: tuple[int, ...], row: int) -> tuple[int, Routes | None]:
        """Copy the KV that is kept of the beginning of `tokens` to a row; how many tokens it is, and their experts."""
        found = self.prefixes.find(root, tokens) if len(self.prefixes) else []
        if not found:
            return 0, None
        kept, routes = joined(found)
        count = kept[0].shape[2]
        for stored, one in zip((*self.keys, *self.values), kept, strict=True):
            stored[:, row, :, :count] = one
        return count, routes

    def keep(self, root: Root, tokens: tuple[int, ...], row: int, routes: Routes | None) -> None:
        """Keep the KV of the first tokens of a row, which a prefill wrote, for requests that begin with them."""
        self.prefixes.keep(root, tokens, [one[:, row] for one in (*self.keys, *self.values)], routes)

    def copy_row(self, source: int, targets: Tensor, columns: int) -> None:
        """Copy the first `columns` columns of one row to the rows `targets` [n]."""
        for one in (*self.keys, *self.values):
            one[:, targets, :, :columns] = one[:, source : source + 1, :, :columns]

    def move_row(self, source: int, target: int, columns: int) -> None:
        for one in (*self.keys, *self.values):
            one[:, target, :, :columns] = one[:, source, :, :columns]

    def attend_prompts(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, prompts: PackedPrompts, scoring: Scoring
    ) -> Tensor:
        """Causal attention of prompts, whose keys and values were written: [1, heads, T, d] -> [1, heads, T, dv].

        On a CPU, where KV is kept between requests, one call computes at most BLOCK queries of a prompt, and where they
        begin depends on the prompt alone: torch's kernel rounds differently for other numbers of queries.
        """
        if not any(run.start or (run.in_blocks and self._in_blocks) for run in prompts.runs):
            return attend(q, k, v, prompts.packing, scoring)
        parts: list[Tensor] = []
        sizes = [len(run.rows) * run.length for run in prompts.runs]
        for run, part in zip(prompts.runs, q[0].split([*sizes, q.shape[2] - sum(sizes)], 1), strict=False):
            queries = part.unflatten(1, (-1, run.length)).transpose(0, 1)
            reach = slice(run.start + run.length)
            keys, values = (x[:, :, reach].index_select(0, run.rows) for x in self.of_layer(layer))
            most = BLOCK if run.in_blocks and self._in_blocks else run.length
            found = []
            for start, end in pieces(run.start, run.length, most, scoring.chunk):
                first = 0 if scoring.chunk is None else (run.start + start) // scoring.chunk * scoring.chunk
                seen = slice(first, run.start + end)
                out = attend_rows(queries[:, :, start:end], keys[:, :, seen], values[:, :, seen], scoring)
                found.append(out.unflatten(1, (-1, end - start)))
            parts.append(torch.cat(found, 2).flatten(1, 2))
        return F.pad(torch.cat(parts, 1), (0, 0, 0, q.shape[2] - sum(sizes)))[None]

    def attend(self, layer: int, queries: Tensor, step: Step, scoring: Scoring) -> Tensor:
        """One query token per row over its row: queries [rows, heads, d] -> [rows, heads * value_size].

        The query heads that share a KV head become its query length: no key or value is repeated in memory.
        """
        keys, values = (x[: step.rows] for x in self.of_layer(layer))
        if self._ragged[self._places[layer][0]] and scoring.plain and scoring.chunk is None:
            return varlen.attend_cached(queries, keys, values, step.filled, scoring.scale, scoring.window).flatten(1)
        keys, values = keys[:, :, : step.columns], values[:, :, : step.columns]
        hidden = _hidden(step, scoring)
        groups = queries.shape[1] // keys.shape[1]
        if scoring.plain and self._head_by_head and groups <= 4:
            out = F.scaled_dot_product_attention(
                queries[:, :, None], keys, values, attn_mask=hidden, scale=scoring.scale, enable_gqa=True
            )
            return out.reshape(step.rows, -1)
        folded = queries.reshape(step.rows, keys.shape[1], groups, -1)
        if scoring.softcap is None and scoring.sinks is None:  # keys that were chosen too: rounds as in training
            mask = hidden.expand(-1, 1, groups, -1)
            out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scoring.scale)
        else:
            out = attend_hidden(folded, keys, values, hidden, scoring)
        return out.reshape(step.rows, -1)


def rounded(number: int, multiple: int) -> int:
    """The next multiple."""
    return -(-number // multiple) * multiple


def _hidden(step: Step, scoring: Scoring) -> Tensor:
    """The step's mask, without columns that a sliding window or a chunk has left behind, or that were not chosen."""
    if scoring.chosen is not None:
        return step.hidden.masked_fill(~scoring.chosen[0][:, None], float("-inf"))
    if scoring.window is None and scoring.chunk is None:
        return step.hidden
    columns, positions = torch.arange(step.columns, device=step.hidden.device), step.positions[: step.rows, None]
    first = positions - (scoring.window or 0) + 1
    if scoring.chunk is not None:
        first = positions // scoring.chunk * scoring.chunk
    return step.hidden.masked_fill((columns[None] < first)[:, None, None, :], float("-inf"))
