"""Mixture-of-experts training: expert loads, balance and z losses, and replay of recorded routes.

    micro-batch --forward, watched--> routes and router scores --+--> loads, entropy: added up over the step and ranks
                    ^                                            +--> `router_aux_loss`, `router_z_loss` [T]
        recorded routes (batch.routed_experts)                   `--> `routed_experts` [T, layers, top_k]

The balance of a sequence s with T tokens, in a layer with E experts of which each token takes K:

    balance_s = sum over experts i of f_i P_i,   P_i = mean over its tokens of the router's share for i,
    f_i = E / (K T) x how often i was taken in the sequence             (1 where all are taken equally often)

is the sequence-wise loss of DeepSeek-V3 (arXiv 2412.19437, equations 17 to 20), as a mean over layers. Every token of
the sequence carries this loss, and the step's loss weights, divided by their sum, make it a mean over tokens (or over
sequences, where these weigh the same). So a coefficient does not depend on what else the loss weights do, such as
adding up the tokens of an answer, nor on how the step is cut into micro-batches, unlike the usual product of two means
over a micro-batch. `balance_over: batch` (Qiu et al. 2025, arXiv 2501.11873) counts f_i over the whole optimizer step,
before its first backward: the loss is then linear in the tokens, and does not depend on the cut either.

A sequence with a loss counts all of its tokens, including the prompt; a shared prompt counts once for each sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hone.engines.base import Ranks
from hone.engines.layout import Layout
from hone.engines.settings import MoeConfig
from hone.models.attention.indexed import DIVERGENCES, Divergences, indexers
from hone.models.errors import ModelError
from hone.models.routing import ROUTES, UNKNOWN, Routers, Routing, expert_count, watched
from hone.types import Batch, Metric, Metrics, Need

LOADS = "expert_loads"  # an entry of `needs`: count this forward in the step's metrics
# Entries of `needs` and of ModelOutput.extras: [T] with gradient
BALANCE, Z_LOSS, INDEXERS = "router_aux_loss", "router_z_loss", "indexer_loss"


class Experts:
    """Expert loads, losses and route replay for one engine's model."""

    def __init__(self, routers: Routers, config: MoeConfig | None) -> None:
        self.routers = routers
        replay = config.routing_replay if config is not None else "none"
        self._replays = replay != "none"
        self._expected = replay == "rollout"
        self._over_batch = config is not None and config.balance_over == "batch"
        losses = (BALANCE, Z_LOSS, INDEXERS) if config is not None else ()
        coefs = {name: float(getattr(config, f"{name}_coef")) for name in losses}
        self._coefs = {name: coef for name, coef in coefs.items() if coef > 0}
        self._total_weight: Tensor | None = None  # scalar: sum of the loss weights of the whole optimizer step
        self._frequencies: Tensor | None = None  # [layers, experts] of the whole optimizer step; mean 1
        self._tally: Tensor | None = None  # [layers * experts + 4]: how often each expert was taken, and `_FIGURES`

    @property
    def needs(self) -> frozenset[str]:
        """The outputs that a training forward needs in addition to the loss's own."""
        return frozenset({LOADS, *self._coefs})

    @property
    def losses(self) -> frozenset[str]:
        """The router losses that training adds."""
        return frozenset(self._coefs)

    @property
    def counts_first(self) -> bool:
        """Return whether the engine must count the loads of the whole step before its first backward."""
        return self._over_batch and BALANCE in self._coefs

    # ------------------------------------------------------------------------------------------------ one forward

    @contextmanager
    def watch(self, batch: Batch, layout: Layout, part: Routers | None = None) -> Iterator[Routing]:
        """Record the experts chosen by a forward inside this context; replay the batch's routes if replay is on.

        `part` are the routers of the part of the model that runs, if it is not all of it. Every rank of
        `layout.packing.ranks` has the tokens of its slice of the row.
        """
        routing = Routing(part or self.routers, self._given(batch, layout) if self._replays else None)
        if INDEXERS in self._coefs and torch.is_grad_enabled():
            layout.packing.layouts[DIVERGENCES] = Divergences()
        with watched(routing):
            yield routing

    def _given(self, batch: Batch, layout: Layout) -> Tensor | None:
        routes = batch.routed_experts
        if routes is None:
            return None
        row = routes[layout.take]
        return row if layout.packing.ranks is None else layout.packing.ranks.own(row)

    def check_routes(self, batch: Batch, trained: bool) -> None:
        """Raise ValueError if the routes belong to another model, or if a training batch lacks routes to replay."""
        routes = batch.routed_experts if self._replays else None
        if routes is None:
            if trained and self._expected:
                raise ValueError(
                    "actor.moe.routing_replay=rollout needs the experts that the rollout chose, but the batch has no "
                    "Batch.routed_experts: the rollout did not record them; set routing_replay to none"
                )
            return
        wanted, largest = (self.routers.layers, self.routers.top_k), int(routes.max())
        if tuple(routes.shape[1:]) != wanted or largest >= self.routers.experts:
            raise ValueError(
                f"Batch.routed_experts was recorded with another model: it has {tuple(routes.shape[1:])} (layers, "
                f"experts) for each token and expert numbers up to {largest}; this model has {wanted} and "
                f"{self.routers.experts} experts"
            )

    def outputs(self, batch: Batch, layout: Layout, routing: Routing, needs: frozenset[Need]) -> dict[str, Tensor]:
        """Compute the outputs in `needs` from a watched forward, each [T] or [T, ...]; add its loads to the tally.

        Of a part of the model: the losses' share of its layers (the whole is the sum over parts), and its routes.
        """
        if not needs & {LOADS, ROUTES, BALANCE, Z_LOSS, INDEXERS}:
            return {}
        tokens = _RankTokens(batch, layout)
        if LOADS in needs:
            self._count(routing, tokens)
        scored = routing.scored() if needs & {BALANCE, Z_LOSS} else []
        found: dict[str, Tensor] = {}
        if ROUTES in needs:
            found[ROUTES] = tokens.of_batch(routing.choices())
        if BALANCE in needs:
            found[BALANCE] = tokens.per_token(self._balance(routing, scored, tokens))
        if Z_LOSS in needs:
            square = torch.stack([logits.logsumexp(-1).square() for logits, _ in scored]).sum(0) / self.routers.layers
            found[Z_LOSS] = tokens.per_token(tokens.mean(square[:, None])[:, 0])
        if INDEXERS in needs:
            found[INDEXERS] = layout.packing.layouts[DIVERGENCES].mean()[layout.where]
        return found

    def _balance(self, routing: Routing, scored: list[tuple[Tensor, Tensor]], tokens: _RankTokens) -> Tensor:
        """Balance loss of each sequence, [N]."""
        scale = self.routers.experts / self.routers.top_k
        total: Tensor | None = None
        for layer, (_, scores) in zip(routing.routers.numbers, scored, strict=True):
            if self._frequencies is None:
                taken = scale * tokens.mean(_taken(routing.chosen[layer], scores))
            else:
                taken = self._frequencies[layer].to(scores.dtype)
            one = (taken * tokens.mean(scores)).sum(-1)
            total = one if total is None else total + one
        assert total is not None
        return total / self.routers.layers

    # ----------------------------------------------------------------------------------------------- a whole step

    @torch.no_grad()
    def _count(self, routing: Routing, tokens: _RankTokens) -> None:
        """Add this rank's tokens to the tally."""
        times, here = tokens.times, routing.routers.layers
        loads, entropy = times.new_zeros(self.routers.layers, self.routers.experts), times.new_zeros(())
        for layer, (_, scores) in zip(routing.routers.numbers, routing.scored(), strict=True):
            loads[layer] = times @ _taken(routing.chosen[layer], scores).double()
            entropy += times @ torch.special.entr(scores.double()).sum(-1)
        replaced = sum((times @ one.double() for one in routing.replaced.values()), times.new_zeros(()))
        known = times.new_zeros(())
        if routing.given is not None:
            known = times @ (routing.given[:, 0, 0] != UNKNOWN).double() * here * self.routers.top_k
        figures = torch.stack([entropy, times.sum() * here, replaced, known])
        one = torch.cat([loads.flatten(), figures])
        self._tally = one if self._tally is None else self._tally + one

    def _take_tally(self, ranks: Ranks, device: str) -> tuple[Tensor, list[float]]:
        """Sum loads [layers, experts] and the four figures over all micro-batches and ranks, and reset the tally.

        Ranks of a tensor group count the same tokens, which cancels out: callers only use ratios of these sums.
        """
        split = self.routers.layers * self.routers.experts
        tally = self._tally if self._tally is not None else torch.zeros(split + 4, dtype=torch.float64, device=device)
        self._tally = None
        tally = ranks.sum(tally)
        return tally[:split].view(self.routers.layers, self.routers.experts), tally[split:].tolist()

    def expect(self, batch: Batch, ranks: Ranks, device: str) -> None:
        """Check the routes and add up the loss weights of a step; `batch` is this data-parallel rank's part of it."""
        self.check_routes(batch, trained=True)
        if not self._coefs:
            return
        assert batch.loss_weights is not None
        own = torch.where(batch.loss_mask, batch.loss_weights, 0).double().sum().to(device)
        times = ranks.world // ranks.data_parallel_size  # so many ranks have each part
        self._total_weight = (ranks.sum(own) / times).clamp(min=1e-30)  # a step may have weights of 0 alone

    def begin(self, ranks: Ranks, device: str) -> None:
        """Turn the loads counted before the step into the frequencies of its balance loss."""
        loads, _ = self._take_tally(ranks, device)
        self._frequencies = loads / loads.mean(-1, keepdim=True).clamp(min=1)

    def end(self, ranks: Ranks, device: str) -> Metrics:
        """Metrics of the step, the same on every rank; empty if no token was counted."""
        loads, (entropy, tokens, replaced, known) = self._take_tally(ranks, device)
        self._frequencies = None
        if not tokens:
            return {}
        busiest = loads.amax(-1) / loads.mean(-1)
        found = {
            "train/expert_load_max_over_mean": Metric.mean(float(busiest.mean())),
            "train/expert_load_worst_layer": Metric.max(float(busiest.max())),
            "train/experts_unused": Metric.mean(float((loads == 0).double().mean())),
            "train/router_entropy": Metric.mean(entropy / tokens),
        }
        return found | ({"train/routes_replaced": Metric.mean(replaced / known)} if known else {})

    # ------------------------------------------------------------------------------------------------------- loss

    def penalty(self, extras: Any) -> tuple[Tensor | float, dict[str, Tensor]]:
        """Router losses to add to each token's loss, [T], and as metrics: these without coefficients.

        Those to add are divided by the sum of the loss weights, as they are multiplied with these like every loss.
        """
        total: Tensor | float = 0.0
        for name, coef in self._coefs.items():
            assert self._total_weight is not None  # `expect` comes first
            total = total + coef / self._total_weight.float() * extras[name]
        return total, {f"train/{name}": extras[name].detach() for name in self._coefs}


class _RankTokens:
    """Map between the tokens of a batch [T] and this rank's tokens of the row [t]."""

    def __init__(self, batch: Batch, layout: Layout) -> None:
        device = layout.where.device
        self._ranks = layout.packing.ranks
        length = len(layout.token_ids)
        start, self._here = 0, length
        if self._ranks is not None:
            start, self._here = self._ranks.start(length), self._ranks.slices(length)[self._ranks.rank]
        where = layout.where - start
        self._tokens = ((where >= 0) & (where < self._here)).nonzero()[:, 0]  # of the batch, that are here
        self._where = where[self._tokens]
        self._lengths = batch.lengths
        self._sequence = torch.repeat_interleave(torch.arange(batch.num_sequences, device=device), batch.lengths)
        self._num_tokens = batch.num_tokens

    @property
    def times(self) -> Tensor:
        """Number of batch tokens that share each token of the row, [t] float64."""
        ones = torch.ones(len(self._where), dtype=torch.float64, device=self._where.device)
        return torch.zeros(self._here, dtype=torch.float64, device=ones.device).index_add(0, self._where, ones)

    def mean(self, values: Tensor) -> Tensor:
        """Mean over each sequence's tokens on all ranks, [t, ...] -> [N, ...]."""
        zeros = values.new_zeros(len(self._lengths), *values.shape[1:])
        sums = zeros.index_add(0, self._sequence[self._tokens], values.index_select(0, self._where))
        sums = sums if self._ranks is None else self._ranks.whole(sums)
        return sums / self._lengths.to(sums.dtype)[:, None]

    def per_token(self, values: Tensor) -> Tensor:
        """Each sequence's value on all of its tokens, [N] -> [T]."""
        return values[self._sequence]

    def of_batch(self, values: Tensor) -> Tensor:
        """Values of all ranks in the order of the batch, [t, ...] int16 -> [T, ...]."""
        spread = values.new_zeros(self._num_tokens, *values.shape[1:])
        spread[self._tokens] = values[self._where]
        if self._ranks is not None:
            wide = spread.int()  # gloo cannot sum int16
            dist.all_reduce(wide, group=self._ranks.group)
            spread = wide.to(values.dtype)
        return spread


def open_experts(model: Any, config: MoeConfig | None, name: str, run: Any, split: bool = False) -> Experts | None:
    """Find the experts of a loaded model; None if it is dense. `run` sends a few tokens through it.

    `split`: ranks share the heads of attention. Raises ModelError if a setting needs routers, but the model has none or
    its routers do not choose by topk, and if indexers should learn that cannot. Without such a setting, the model
    trains without expert metrics.
    """
    refuse_indexer_loss(config, name, _why_indexers_stay(model, split))
    try:
        routers = Routers.find(model)
        if routers is not None:
            routers.check(run, name)
            return Experts(routers, config)
        reason = "no router of it can be found" if expert_count(model.config) else "it has no experts"
    except ModelError as error:
        reason = str(error)
    require_unused(config, name, reason)
    return None


def require_unused(config: MoeConfig | None, name: str, reason: str) -> None:
    """Raise ModelError if a setting needs routers, with the `reason` why there are none."""
    asked = [] if config is None else _asked(config)
    if config is not None and asked:
        raise ModelError(f"{config.key_of(asked[0])}: {name} cannot do that: {reason}; remove the key")


def _why_indexers_stay(model: Any, split: bool) -> str:
    """Why the indexers of a model cannot learn; empty: they can."""
    found = indexers(model)
    if not found:
        return "it has no indexer"
    if not all(weight.requires_grad for one in found for weight in one.parameters()):
        return "with an adapter (actor.lora) their weights are frozen"
    return "with parallel.tensor a rank has some heads of the attention that they learn from" if split else ""


def refuse_indexer_loss(config: MoeConfig | None, name: str, reason: str) -> None:
    """Raise ModelError if indexers should learn, and there is a `reason` why they cannot."""
    if config is not None and config.indexer_loss_coef > 0 and reason:
        key = config.key_of("indexer_loss_coef")
        raise ModelError(f"{key}: the indexers of {name} cannot learn: {reason}; remove the key")


def _asked(config: MoeConfig) -> list[str]:
    """The keys of the section that need routers."""
    asked = {
        "routing_replay": config.routing_replay != "none",
        "router_aux_loss_coef": config.router_aux_loss_coef > 0,
        "router_z_loss_coef": config.router_z_loss_coef > 0,
        "indexer_loss_coef": config.indexer_loss_coef > 0,
    }
    return [key for key, wanted in asked.items() if wanted]


def _taken(chosen: Tensor, like: Tensor) -> Tensor:
    """1 where the token took the expert, [t, experts], in the dtype of `like`."""
    return torch.zeros_like(like).scatter(1, chosen, 1.0)
