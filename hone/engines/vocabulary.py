"""A vocabulary whose logits are shared out over ranks: the sums, gathers and top k that scores need.

    logits [R, V / n] on each of n ranks --all-reduces of [R], top k of n x k--> the same results on every rank

No rank ever makes whole logits, in forward or backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hone.engines.logprobs import WHOLE, Head, Vocabulary


@dataclass(frozen=True, slots=True)
class SharedVocabulary:
    """Each rank of a group has the logits of `share` neighbouring tokens, the last one perhaps of fewer.

    A `hone.engines.logprobs.Vocabulary`.
    """

    group: Any  # process group
    rank: int
    size: int
    share: int

    def width(self, rows: int) -> int:
        return self.share

    def log_softmax(self, logits: Tensor) -> Tensor:
        largest = logits.amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        shifted = logits - largest[:, None]
        return shifted - self.sum(shifted.exp()).log()[:, None]

    def softmax(self, logits: Tensor) -> Tensor:
        return self.log_softmax(logits).exp_()

    def sum(self, values: Tensor) -> Tensor:
        total = values.sum(-1)
        dist.all_reduce(total, group=self.group)
        return total

    def gather(self, values: Tensor, ids: Tensor) -> Tensor:
        own, here = self._own(ids, values)
        found = torch.where(here, values.gather(1, own), 0.0)
        dist.all_reduce(found, group=self.group)
        return found

    def top(self, values: Tensor, count: int) -> tuple[Tensor, Tensor]:
        found = values.topk(min(count, values.shape[1]))
        missing = count - found.values.shape[1]
        each = F.pad(found.values, (0, missing), value=float("-inf"))
        ids = F.pad(found.indices + self.rank * self.share, (0, missing))
        all_values = [torch.empty_like(each) for _ in range(self.size)]
        all_ids = [torch.empty_like(ids) for _ in range(self.size)]
        dist.all_gather(all_values, each.contiguous(), group=self.group)
        dist.all_gather(all_ids, ids.contiguous(), group=self.group)
        best = torch.cat(all_values, 1).topk(count)
        return best.values, torch.cat(all_ids, 1).gather(1, best.indices)

    def scatter_add(self, into: Tensor, ids: Tensor, values: Tensor) -> None:
        own, here = self._own(ids, into)
        into.scatter_add_(1, own, torch.where(here, values, 0.0))

    def _own(self, ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Columns of token ids among this rank's (0 for others'), and which are this rank's."""
        own = ids - self.rank * self.share
        here = (own >= 0) & (own < values.shape[1])
        return torch.where(here, own, 0), here


@dataclass(frozen=True, slots=True)
class VocabularyRanks:
    """The ranks that share the rows of an embedding and a head: each has neighbours, the last one perhaps fewer."""

    group: Any  # process group
    rank: int
    size: int

    def share(self, tokens: int) -> int:
        """Rows on each rank but the last, of `tokens` rows."""
        return -(-tokens // self.size)

    def rows(self, tokens: int) -> slice:
        """The tokens whose rows this rank has."""
        share = self.share(tokens)
        return slice(share * self.rank, min(share * (self.rank + 1), tokens))

    def vocabulary(self, tokens: int) -> Vocabulary:
        """Return the layout of the logits of `tokens` tokens over the ranks."""
        return WHOLE if self.size == 1 else SharedVocabulary(self.group, self.rank, self.size, self.share(tokens))

    def own(self, load: Callable[[], Head]) -> Callable[[], Head]:
        """Of a whole head, loaded at the first call, the rows of this rank."""

        @cache
        def own() -> Head:
            head = load()
            rows = self.rows(len(head.weight))
            bias = None if head.bias is None else head.bias[rows].clone()
            return replace(
                head, weight=head.weight[rows].clone(), bias=bias, vocabulary=self.vocabulary(len(head.weight))
            )

        return own
