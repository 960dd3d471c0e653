"""Sparse attention whose keys an indexer chooses for each token (DSA: DeepSeek-V3.2, GLM-5, Hunyuan 4, A.X K2).

    attention of a layer --> its indexer --`_choose`--> for each run of the row: which keys are seen (a mask)
                         --> the attention function, with these masks as `indices` --> `attend_chosen`
                         --> later layers that share the choice (GLM-5)

The model's own indexer computes the scores and takes the best `index_topk` keys. Here it sees one run of equal
sequences at a time: the keys of the sequence, after those of a shared prefix. So a packed row chooses what each
sequence alone does. Memory for scores and masks grows with the square of a sequence's length.

The choice has no gradient. An indexer learns by a loss of its own alone, in a forward whose packing has `Divergences`:
that of the shares of attention, summed over heads, from the softmax of its scores, both over the chosen keys. Neither
the attention nor what goes into the indexer gets a gradient of it.

Source: DeepSeek-V3.2 (arXiv:2512.02556), and the indexers of transformers 5.19.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hone.models.attention.explicit import attention_weights

DIVERGENCES = "divergences of indexers"  # in `Packing.layouts`, of a forward whose indexers learn
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

    def scoring(self) -> tuple[Queries, _Scores]:
        """The same call with gradients for the indexer alone, and the scores of each of its choices, as they come."""
        seen = _Scores()
        own = inspect.unwrap(self.forward.__func__).__get__(self.indexer)  # type: ignore[attr-defined]

        def forward(*args: Any, **named: Any) -> Tensor:
            with seen:
                best: Tensor = own(*args, **named)
            return best

        return replace(self, forward=forward, inputs=tuple(x.detach() for x in self.inputs)), seen


class _Scores(TorchFunctionMode):
    """Keeps what an indexer's `topk` chooses from: [count, L, K] of each run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.topk, torch.Tensor.topk):
            self.found.append(args[0])
        return function(*args, **(kwargs or {}))


class Chosen(list[Tensor]):
    """The keys that each query of a row sees, [count, L, K] bool for each run."""

    scores: Sequence[Tensor] = ()  # where the indexer learns, until the attention of its layer has taken them


class Divergences:
    """Divergences of attention from the scores of the indexers, of one forward: [T] of its row for each of them."""

    def __init__(self) -> None:
        self._found: list[Tensor] = []
        self._taken = False

    def add(self, one: Tensor) -> None:
        if not self._taken:  # a layer that is recomputed
            self._found.append(one)

    def mean(self) -> Tensor:
        """Mean over the indexers, [T] with gradient. Call it once, behind the forward."""
        self._taken = True
        return torch.stack(self._found).mean(0)


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


def choose_in_row(queries: Queries, packing: Any) -> Chosen:
    """`ChooseFn` for a packed row with this `Packing`."""
    kept: list[Tensor] = []  # the keys of each run
    found, start = Chosen(), 0
    if DIVERGENCES in packing.layouts and torch.is_grad_enabled():
        queries, seen = queries.scoring()
        found.scores = seen.found
    for run in packing.runs:
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


def attend_runs(parts: Sequence[tuple[Tensor, Tensor, Tensor]], packing: Any, scoring: Any) -> list[Tensor]:
    """Attention of each run of a row over the keys that were chosen, by a `Scoring`."""
    chosen: Sequence[Tensor] = scoring.chosen
    rule = scoring.scale, scoring.dropout, scoring.sinks
    outputs = [attend_chosen(*part, one, *rule) for part, one in zip(parts, chosen, strict=True)]
    if not (isinstance(chosen, Chosen) and chosen.scores):
        return outputs
    runs = zip(parts, chosen, chosen.scores, strict=True)
    found = torch.cat([divergence(q, k, one, scores, *rule[::2]).flatten() for (q, k, _), one, scores in runs])
    packing.layouts[DIVERGENCES].add(found)
    chosen.scores = ()  # later layers that share the choice leave the indexer alone
    return [outputs[0] + 0 * found.sum().to(outputs[0].dtype), *outputs[1:]]  # ranks without a loss have gradients, too


def divergence(q: Tensor, k: Tensor, chosen: Tensor, scores: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    """Divergence of attention's shares from the softmax of an indexer's `scores`, over the keys `chosen`: [n, L].

    q [n, heads, L, d], k [n, kv_heads, K, d], `chosen` and `scores` [n, L, K]. Equation 4 of DeepSeek-V3.2; only the
    scores get a gradient.
    """
    with torch.no_grad():
        weights = _weights(q, k, chosen[:, None], scale, sinks).sum(1)
        shares = weights / weights.sum(-1, keepdim=True)
    logs = scores.masked_fill(~chosen, float("-inf")).log_softmax(-1)
    return torch.where(chosen, torch.xlogy(shares, shares) - shares * logs, 0).sum(-1)


def _weights(q: Tensor, k: Tensor, mask: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    """Weights of attention to the keys, [n, heads, L, K] in float32 at least; what goes to the sinks is left out."""
    hidden = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, float("-inf"))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return attention_weights((q @ k.mT) * scale, hidden, None, None if sinks is None else sinks.view(1, -1, 1, 1))


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
        out = F.dropout(_weights(q, k, mask, scale, sinks).to(v.dtype), dropout) @ v.repeat_interleave(groups, 1)
    return out.transpose(0, 1).flatten(1, 2)
