"""Sparse attention over the KV cache: indexers choose among the cached tokens of each row (see `attention.indexed`).

The keys of an indexer are a layer of the cache whose values have size 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.models.attention.indexed import Queries, attend_chosen
from hone.models.attention.packed import Scoring
from hone.rollout.builtin.cache import Addresses, KVCache, PackedPrompts, Step


def choose_in_step(queries: Queries, cache: KVCache, layer: int, at: Addresses, step: Step) -> list[Tensor]:
    """Write each row's key of the indexer; the columns that each row's token sees, [rows, 1, columns] bool."""

    def keys(own: Tensor) -> Tensor:  # [rows, 1, D]
        cache.write(layer, at, own, own[..., :0])
        return cache.of_layer(layer)[0][: step.rows, 0, : step.columns]

    columns = torch.arange(step.columns, device=step.positions.device)
    visible = columns <= step.positions[: step.rows, None, None]
    return [queries.choose(slice(step.rows), step.rows, visible, keys)]


def choose_in_prompts(
    queries: Queries, cache: KVCache, layer: int, at: Addresses, prompts: PackedPrompts
) -> list[Tensor]:
    """Write the prompts' keys of the indexer; the columns that their tokens see, [n, L, columns] bool for each run."""
    found, start = [], 0
    for run in prompts.runs:
        tokens, reach = slice(start, start + len(run.rows) * run.length), run.start + run.length
        columns = torch.arange(reach, device=run.rows.device)
        visible = (columns <= columns[run.start :, None])[None]

        def keys(own: Tensor, rows: Tensor = run.rows, tokens: slice = tokens, reach: int = reach) -> Tensor:
            new = own.flatten(0, 1)[:, None]
            cache.write(layer, tuple(one[tokens] for one in at), new, new[..., :0])
            return cache.of_layer(layer)[0][:, 0, :reach].index_select(0, rows)

        found.append(queries.choose(tokens, len(run.rows), visible, keys))
        start = tokens.stop
    return found


def attend_prompts(cache: KVCache, layer: int, q: Tensor, prompts: PackedPrompts, scoring: Scoring) -> Tensor:
    """`KVCache.attend_prompts` over the keys that were chosen, which are in the cache: [1, heads, T, dv]."""
    parts, start = [], 0
    for run, chosen in zip(prompts.runs, scoring.chosen or (), strict=True):
        end = start + len(run.rows) * run.length
        queries = q[0, :, start:end].unflatten(1, (len(run.rows), -1)).transpose(0, 1)
        keys, values = (x[:, :, : chosen.shape[2]].index_select(0, run.rows) for x in cache.of_layer(layer))
        parts.append(attend_chosen(queries, keys, values, chosen, scoring.scale, 0.0, scoring.sinks))
        start = end
    return F.pad(torch.cat(parts, 1), (0, 0, 0, q.shape[2] - start))[None]
