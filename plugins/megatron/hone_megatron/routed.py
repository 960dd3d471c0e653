"""The mixtures of experts on one rank: forwards that `hone.engines.moe.Experts` watches, over pipeline stages too.

    part of the model (a stage) --watched--> its routes, loads, and its layers' share of the router losses
        last part          the losses are added to the token losses, as in every engine
        other parts        `attached` to the hidden states that go to the next stage: their backward starts there

Sums for the metrics, and recorded routes, go over the stages once after all micro-batches have run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hone.engines.moe import Experts, refuse_indexer_loss, require_unused
from hone.engines.settings import MoeConfig
from hone.models.routing import ROUTES, Routers
from hone.types import Batch, ModelOutput, Need
from hone_megatron.families import ModelShape
from hone_megatron.mesh import MegatronRanks
from hone_megatron.model import Model
from hone_megatron.rows import Row

Outputs = tuple[Tensor, dict[str, Tensor]]
"""Hidden states of a part of the model, and the outputs of its routers, [T, ...] each."""


class RoutedParts:
    """The parts of the model on this rank, and the routers in each. A dense model has `experts` None."""

    def __init__(self, parts: Sequence[Model], ranks: MegatronRanks, moe: MoeConfig | None, name: str) -> None:
        """Raises ModelError if a setting needs routers, but the model has none."""
        self._parts = parts
        self._ranks = ranks
        self._routers = [Routers.find(part, part.mixtures_before) for part in parts]
        self._routes: list[list[Tensor]] = [[] for _ in parts]  # by micro-batch: [T, layers of the part, top_k]
        self._sums: Tensor | None = None  # of losses over tokens: weighted, and each loss by itself
        self.experts = self._open(parts[0].config, moe, name)

    def _open(self, shape: ModelShape, moe: MoeConfig | None, name: str) -> Experts | None:
        if not shape.mixtures:
            require_unused(moe, name, "it has no experts")
            return None
        refuse_indexer_loss(moe, name, "the megatron engine has none")
        return Experts(Routers(shape.mixtures, shape.num_moe_experts, shape.moe_router_topk), moe)

    def run(self, number: int, row: Row, batch: Batch, needs: frozenset[Need]) -> Outputs:
        """Run a part on what the schedule has given it."""
        part, routers = self._parts[number], self._routers[number]
        if routers is None or self.experts is None:
            return part(row.token_ids, row.angles, row.packed), {}
        with self.experts.watch(batch, row.layout, routers) as routing:
            hidden = part(row.token_ids, row.angles, row.packed)
        return hidden, self.experts.outputs(batch, row.layout, routing, needs)

    def run_stage(self, number: int, row: Row, batch: Batch, needs: frozenset[Need]) -> Outputs:
        """`run` in a pipeline: routes are kept for `joined`, and losses of all but the last part are attached."""
        hidden, extras = self.run(number, row, batch, needs)
        if ROUTES in extras:
            self._routes[number].append(extras.pop(ROUTES))
        if torch.is_grad_enabled() and extras and not self._parts[number].post_process:
            hidden = attached(hidden, self._loss(extras, batch))
        return hidden, extras

    def _loss(self, extras: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """The sum over a micro-batch of a part's router losses times loss weights."""
        assert self.experts is not None
        assert batch.loss_weights is not None
        penalty, shown = self.experts.penalty(extras)
        total = (penalty * batch.loss_weights)[batch.loss_mask].sum()
        sums = torch.stack([total.detach(), *(shown[name][batch.loss_mask].sum() for name in sorted(shown))]).double()
        self._sums = sums if self._sums is None else self._sums + sums
        return total

    def stage_sums(self, device: str) -> dict[str, Tensor]:
        """Sums of `train/loss` and of each router loss that `run_stage` attached on any stage. Every stage calls it."""
        names = sorted(f"train/{name}" for name in self.experts.losses) if self.experts is not None else []
        if not names:
            return {}
        sums = torch.zeros(len(names) + 1, dtype=torch.float64, device=device) if self._sums is None else self._sums
        self._sums = None
        dist.all_reduce(sums, group=self._ranks.stage_group)
        return dict(zip(["train/loss", *names], sums, strict=True))

    def joined(self, batches: Sequence[Batch], outputs: Sequence[ModelOutput]) -> list[ModelOutput]:
        """The last stage's outputs of some micro-batches, with the routes of all stages. Every stage calls it."""
        assert self.experts is not None
        whole, counts = self.experts.routers, [batch.num_tokens for batch in batches]
        routes = torch.zeros(sum(counts), whole.layers, whole.top_k, dtype=torch.int32)  # gloo cannot sum int16
        routes = routes.to(batches[0].token_ids.device)
        for routers, found in zip(self._routers, self._routes, strict=True):
            if routers is not None:
                routes[:, routers.numbers] = torch.cat(found).int()
            found.clear()
        dist.all_reduce(routes, group=self._ranks.stage_group)
        parts = routes.to(torch.int16).split(counts)
        return [replace(o, extras={**o.extras, ROUTES: one}) for o, one in zip(outputs, parts, strict=False)]


def share_corrections(parts: Sequence[Model], buffers: Mapping[str, Tensor], prefix: str) -> None:
    """Give sigmoid routers the biases of their choice: the buffers themselves, so that loading changes both."""
    for part in parts:
        for layer in part.decoder.layers:
            name = f"{prefix}layers.{layer.layer_number - 1}.mlp.gate.e_score_correction_bias"
            if name in buffers:
                layer.mlp.router.correction = buffers[name]


def attached(hidden: Tensor, loss: Tensor) -> Tensor:
    """`hidden`, whose backward is also that of `loss`."""
    return _Attached.apply(hidden, loss)  # type: ignore[no-any-return, no-untyped-call]


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones_like(ctx.like)
