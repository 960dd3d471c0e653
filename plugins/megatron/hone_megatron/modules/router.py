"""The router of a mixture of experts, in place of Megatron's: it calls `torch.topk` as transformers' routers do.

Megatron's own router replays experts from a list of its own, and its losses count padding. This one makes one call of
`topk` over the scores of all experts and uses what it returns, so `hone.models.routing` can watch and replay it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Routes:
    """Choice and weights of experts in an architecture."""

    scores: Literal["softmax", "sigmoid", "chosen"] = "softmax"  # chosen: a softmax over the chosen experts alone
    normalises: bool = False  # whether the weights of a token's experts are divided by their sum
    scale: float = 1.0  # of the weights
    groups: int = 1  # of experts; the best of them are chosen first, with sigmoid scores
    taken_groups: int = 1


class Router(TopKRouter):  # type: ignore[misc]  # Megatron has no types
    """Sends each token to `top_k` of `num_experts` experts, without losses and without dropping tokens."""

    num_experts: int
    top_k: int
    correction: Tensor | None  # [experts] float32, added to sigmoid scores for the choice only; a buffer of the model

    def __init__(self, config: Any, pg_collection: Any = None) -> None:
        super().__init__(config, pg_collection)
        self.top_k = config.moe_router_topk
        self.register_buffer("correction", None)

    def routing(self, logits: Tensor, padding_mask: None = None) -> tuple[Tensor, Tensor]:
        """Logits [T, 1, experts] -> weights of the chosen experts, zero elsewhere, and which they are, [T, experts]."""
        logits, how = logits.view(-1, self.num_experts), self.config.routes
        weights, chosen = self._by_sigmoid(logits) if how.scores == "sigmoid" else self._by_softmax(logits)
        weights = weights * how.scale
        routes = torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)
        return torch.zeros_like(logits).scatter(1, chosen, weights), routes

    def _by_softmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if self.config.routes.scores == "chosen":
            best, chosen = torch.topk(logits, self.top_k, dim=-1)
            return best.softmax(-1), chosen
        weights, chosen = torch.topk(logits.softmax(-1), self.top_k, dim=-1)
        return (weights / weights.sum(-1, keepdim=True) if self.config.routes.normalises else weights), chosen

    def _by_sigmoid(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The choice of DeepSeek-V3 (arXiv 2412.19437), in the order of operations of transformers."""
        scores, how = logits.sigmoid(), self.config.routes
        assert self.correction is not None
        wanted = scores.detach() + self.correction  # a choice that is repeated would keep other tensors for a backward
        groups = wanted.view(len(wanted), how.groups, -1).topk(2, dim=-1)[0].sum(-1)
        best = torch.topk(groups, how.taken_groups, dim=-1, sorted=False)[1]
        allowed = torch.zeros_like(groups, dtype=torch.bool).scatter(1, best, True)
        allowed = allowed.repeat_interleave(self.num_experts // how.groups, 1)
        chosen = torch.topk(wanted.masked_fill(~allowed, float("-inf")), self.top_k, dim=-1, sorted=False)[1]
        weights = scores.gather(1, chosen)
        return (weights / (weights.sum(-1, keepdim=True) + 1e-20) if how.normalises else weights), chosen
