"""Sparse attention whose keys an indexer chooses for each token (DSA: DeepSeek-V3.2, GLM-5, Hunyuan 4, A.X K2).

    attention of a layer --> its indexer --`_choose`--> for each run of the row: which keys are seen (a mask)
                         --> the attention function, with these masks as `indices` --> `attend_chosen`
                         --> later layers that share the choice (GLM-5)

The model's own indexer computes the scores and takes the best `index_topk` keys. Here it sees one run of equal
sequences at a time: the keys of the sequence, after those of a shared prefix. So a packed row chooses what each
sequence alone does. The indexer has no gradient, as in transformers: it keeps the weights that it came with. Memory for
scores and masks grows with the square of a sequence's length.

Source: DeepSeek-V3.2 (arXiv:2512.02556), and the indexers of transformers 5.19.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.models.attention.explicit import attention_weights

KeysOf = Callable[[Tensor], Tensor]
"""The indexer's keys of the queries' tokens [n, L, D] -> those of all keys that the queries may see [n, K, D]."""


class AnyMask:
    """Stands in for the mask of such a model, which cuts it for its indexer."""

    def __getitem__(self, _: Any) -> AnyMask:
        return self


@dataclass(frozen=True, slots=True)
class Queries:
    """One call of an indexer."""

    indexer: Any
    forward: Callable[..., Tensor]  # of its class
    inputs: tuple[Tensor, ...]  # hidden states, compressed queries, cos, sin: [1, T, size] each

    def choose(self, tokens: slice, count: int, visible: Tensor, keys: KeysOf) -> Tensor:
        """Choose keys for `count` sequences of queries, side by side in the row at `tokens`.

        `visible` [count, L, K] or broadcast to it: the keys that each query may see at all. Returns those that it sees.
        """
        hidden, compressed, cos, sin = (x[0, tokens].unflatten(0, (count, -1)) for x in self.inputs)
        visible = visible.expand(count, hidden.shape[1], visible.shape[-1])
        best = self.forward(hidden, compressed, (cos, sin), visible, None, past_key_values=_Keys(keys))
        return torch.zeros_like(visible).scatter(-1, best.long(), True) & visible


@dataclass(frozen=True, slots=True)
class _Keys:
    """The part of transformers' cache that an indexer uses."""

    of: KeysOf

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        return self.of(keys)


ChooseFn = Callable[[Queries], list[Tensor]]
"""The keys that each query of a row sees: for each run of queries [count, L, K] bool."""


def indexers(model: nn.Module) -> list[Any]:
    """The indexers of a model, in the order of its layers."""
    found = (getattr(module, "indexer", None) for module in model.modules())
    return [one for one in found if isinstance(one, nn.Module) and hasattr(one, "index_topk")]


def choose_by_sequence(model: nn.Module, choose: ChooseFn) -> None:
    """Let the indexers of a model choose among the keys of a token's own sequence."""
    for one in indexers(model):
        one.forward = _Chooser(one, type(one).forward.__get__(one), choose)


@dataclass(frozen=True, slots=True)
class _Chooser:
    """Stands in for an indexer's forward."""

    indexer: Any
    forward: Callable[..., Tensor]
    choose: ChooseFn

    def __call__(
        self,
        hidden: Tensor,
        compressed: Tensor,
        turns: tuple[Tensor, Tensor],
        mask: AnyMask | Tensor,
        *args: Any,
        **named: Any,
    ) -> Tensor | list[Tensor]:
        if isinstance(mask, Tensor):  # another attention than hone's
            return self.forward(hidden, compressed, turns, mask, *args, **named)
        return self.choose(Queries(self.indexer, self.forward, (hidden, compressed, *turns)))


def choose_in_row(queries: Queries, runs: Sequence[Any]) -> list[Tensor]:
    """`ChooseFn` for a packed row: `runs` are those of its `Packing`."""
    kept: list[Tensor] = []  # the keys of each run
    found, start = [], 0
    for run in runs:
        tokens = slice(start, start + run.count * run.length)
        prefix = None if run.rows is None else kept[run.source].index_select(0, run.rows)

        def keys(own: Tensor, prefix: Tensor | None = prefix) -> Tensor:
            kept.append(own)
            return own if prefix is None else torch.cat([prefix, own], 1)

        found.append(queries.choose(tokens, run.count, causal(run.length, run.prefix, queries.inputs[0].device), keys))
        start = tokens.stop
    return found


def causal(length: int, before: int, device: torch.device) -> Tensor:
    """[1, length, before + length] bool: each query sees the keys up to its own."""
    return torch.ones(1, length, before + length, dtype=torch.bool, device=device).tril(before)


def attend_chosen(
    q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, scale: float, dropout: float, sinks: Tensor | None
) -> Tensor:
    """q [n, heads, L, d] over the chosen keys of k [n, kv_heads, K, d], v [.., dv] -> [heads, n * L, dv].

    `chosen` [n, L, K] bool.
    """
    mask, groups = chosen[:, None], q.shape[1] // k.shape[1]
    if sinks is None:
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout, scale=scale, enable_gqa=groups > 1)
    else:
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        hidden = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, float("-inf"))
        weights = attention_weights((q @ k.mT) * scale, hidden, None, sinks.view(1, -1, 1, 1))
        out = F.dropout(weights.to(v.dtype), dropout) @ v
    return out.transpose(0, 1).flatten(1, 2)
