"""Which experts each token goes to, in any transformers mixture of experts: watched, and replayed.

    routers = Routers.find(model)                     # once: its routers, in the order of the layers
    routing = Routing(routers, given)                 # for one forward; `given` [t, layers, top_k] is replayed
    with watched(routing):
        model(...)  --each router--> scores --top-k: here--> weights of the chosen experts --> experts
    routing.choices()                                 # [t, layers, top_k]

Inside `watched`, the one call of `topk` by which a router chooses is taken over: its indices are the given ones, its
values are gathered there. All that follows (normalisation, scaling, gating) is the model's own, so replayed weights are
those that the router gives the replayed experts now, and gradients flow to them as ever. No architecture is named:
what a router does is seen from the calls that it makes, and `Routers.check` refuses one that chooses in another way.

Replay of recorded routes: Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference
Routers" (https://arxiv.org/abs/2510.11370); Zheng et al. 2025 (https://arxiv.org/abs/2507.18071) of the old policy's.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from hone.models.attention import checkpoint_contexts as packed_contexts
from hone.models.errors import ModelError

ROUTES = "routed_experts"  # of Batch.extras and ModelOutput.extras: [T, layers, top_k] int16
UNKNOWN = -1  # in place of an expert's number: the router is to choose for this token itself
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts")  # in transformers' configs

_TOP_K = {torch.topk, torch.Tensor.topk}
_SIGMOID = {torch.sigmoid, torch.Tensor.sigmoid}
_SOFTMAX = {torch.softmax, torch.Tensor.softmax, torch.nn.functional.softmax}


def expert_count(config: Any) -> int:
    """How many experts each mixture of a model has, by its transformers config; 0 for a dense model."""
    text = config.get_text_config()
    found = [getattr(text, name, None) for name in COUNTS]
    return max((count for count in found if isinstance(count, int) and count > 1), default=0)


def mixture_layers(config: Any) -> tuple[int, ...]:
    """Which layers of a model are mixtures with a router that can be found, by its transformers config."""
    empty: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = empty.from_config(copy.deepcopy(config))
    names = [name for name, module in model.named_modules() if _is_router(module)]
    return tuple(int(next(part for part in name.split(".") if part.isdigit())) for name in names)


@dataclass(frozen=True, slots=True)
class Routers:
    """The routers of a model, and what they choose from; every mixture of it has as many experts."""

    layers: int
    experts: int
    top_k: int

    @classmethod
    def find(cls, model: nn.Module) -> Routers | None:
        """The routers of a model, made watchable in place; None if none can be found. Again is fine.

        After sharding, for that replaces the forwards of modules too. Raises ModelError if they differ in size.
        """
        found = [module for module in model.modules() if _is_router(module)]
        sizes = {(int(module.num_experts), int(module.top_k)) for module in found}  # type: ignore[arg-type]
        if not found:
            return None
        if len(sizes) > 1:
            raise ModelError(f"its mixtures differ in (experts, experts per token): {sorted(sizes)}")
        for layer, module in enumerate(found):
            if not getattr(module.forward, "_hone_watched", False):
                module.forward = _watched_forward(module.forward, layer, module)
        ((experts, top_k),) = sizes
        return cls(len(found), experts, top_k)

    def check(self, run: Callable[[], Any], name: str) -> None:
        """Refuse routers that do not choose as they are taken to: `run` sends at least two tokens through the model.

        Raises ModelError.
        """
        own = Routing(self)
        with torch.no_grad(), watched(own):
            run()
        if len(own.chosen) != self.layers:
            silent = self.layers - len(own.chosen)
            raise ModelError(f"{name}: {silent} of its {self.layers} routers choose experts by other means than topk")
        others = (own.choices() + 1) % self.experts  # another choice of as many distinct experts
        replayed = Routing(self, others)
        with torch.no_grad(), watched(replayed):
            run()
        if not torch.equal(replayed.choices(), others):
            raise ModelError(f"{name}: its routers do not take over the experts that they are given")


@dataclass(slots=True)
class Routing:
    """What the routers do in one forward over t tokens: what they are given, and what they have chosen."""

    routers: Routers
    given: Tensor | None = None  # [t, layers, top_k] experts to choose; a token with UNKNOWN chooses itself
    chosen: dict[int, Tensor] = field(default_factory=dict)  # layer -> [t, top_k] int64
    logits: dict[int, tuple[Tensor, bool]] = field(default_factory=dict)  # layer -> [t, experts], and if by sigmoid
    replaced: dict[int, Tensor] = field(default_factory=dict)  # layer -> [t] choices that were not the router's own

    def given_to(self, layer: int) -> Tensor | None:
        return None if self.given is None else self.given[:, layer].long()

    def saw(self, layer: int, choice: _Choice) -> None:
        if choice.chosen is None or choice.own is None or choice.logits is None:
            return  # `Routers.check` notices
        self.chosen[layer] = choice.chosen
        if self.given is not None:
            self.replaced[layer] = (choice.chosen[:, :, None] != choice.own[:, None]).all(-1).sum(-1)
        self.logits[layer] = choice.logits, choice.by_sigmoid  # as they are: the layer may be computed again

    def scored(self) -> list[tuple[Tensor, Tensor]]:
        """Of each layer the router's logits and each expert's share, which sum to 1; both [t, experts], with gradient.

        The share is the softmax, or, of a router that takes sigmoids, these over their sum.
        """
        found = []
        for layer in range(self.routers.layers):
            logits, by_sigmoid = self.logits[layer]
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            found.append((wide, _shares(wide.sigmoid()) if by_sigmoid else wide.softmax(-1)))
        return found

    def choices(self) -> Tensor:
        """The experts of each token, [t, layers, top_k] int16, in the router's order."""
        return torch.stack([self.chosen[layer] for layer in range(self.routers.layers)], 1).to(torch.int16)


@dataclass(frozen=True, slots=True)
class _Again:
    """The same forward computed again, in backward: the same choices, whatever the scores have become by rounding."""

    first: Routing

    def given_to(self, layer: int) -> Tensor | None:
        return self.first.chosen.get(layer)

    def saw(self, layer: int, choice: _Choice) -> None:
        """Nothing is recorded twice."""


_CURRENT: ContextVar[Routing | _Again | None] = ContextVar("hone_routing")


@contextmanager
def watched(routing: Routing | _Again | None) -> Iterator[None]:
    """Routers of models called inside tell `routing` what they choose, and choose what it gives; None: nobody."""
    token = _CURRENT.set(routing)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The `context_fn` for `torch.utils.checkpoint`: recomputation sees the forward's packing, and its routes."""
    first, again = packed_contexts()
    routing = _CURRENT.get(None)
    return first, _both(again, watched(_Again(routing) if isinstance(routing, Routing) else routing))


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def _is_router(module: nn.Module) -> bool:
    named = type(module).__name__.endswith(("Router", "Gate"))
    sizes = (getattr(module, "num_experts", None), getattr(module, "top_k", None))
    return named and all(isinstance(size, int) for size in sizes)


def _watched_forward(forward: Callable[..., Any], layer: int, module: Any) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*arguments: Any, **named: Any) -> Any:
        routing = _CURRENT.get(None)
        if routing is None:
            return forward(*arguments, **named)
        choice = _Choice(module.num_experts, module.top_k, routing.given_to(layer))
        with choice:
            output = forward(*arguments, **named)
        routing.saw(layer, choice)
        return output

    run._hone_watched = True  # type: ignore[attr-defined]
    return run


class _Choice(TorchFunctionMode):
    """One router's forward: which logits it scores, how, and which experts it takes."""

    def __init__(self, experts: int, top_k: int, given: Tensor | None) -> None:
        super().__init__()
        self._experts = experts
        self._top_k = top_k
        self._given = given
        self.logits: Tensor | None = None
        self.by_sigmoid = False
        self.own: Tensor | None = None  # [t, top_k] what the router would have chosen
        self.chosen: Tensor | None = None

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        named = named or {}
        if self.chosen is None and arguments and isinstance(arguments[0], Tensor) and arguments[0].dim() == 2:
            values = arguments[0]
            if function in _TOP_K:
                return self._choose(function, values, arguments[1:], named)
            if function in _SIGMOID | _SOFTMAX and values.shape[-1] == self._experts:
                self.logits, self.by_sigmoid = values, function in _SIGMOID
        return function(*arguments, **named)

    def _choose(self, function: Any, values: Tensor, rest: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The router's topk: over experts, or over groups of experts that it may choose from afterwards."""
        count = rest[0] if rest else named.get("k")
        if values.shape[-1] == self._experts and count == self._top_k:
            self.own = function(values.detach(), *rest, **named)[1]
            self.chosen = self.own
            if self._given is not None:
                self.chosen = torch.where(self._given[:, :1] == UNKNOWN, self.own, self._given)
            if self.logits is None:
                self.logits = values
            # gathered even where nothing is replayed: a recomputation, which replays, then saves the same tensors
            return torch.return_types.topk((values.gather(-1, self.chosen), self.chosen))
        if self._given is not None and self._experts % values.shape[-1] == 0:
            group = self._given.clamp(min=0) // (self._experts // values.shape[-1])
            needed = torch.zeros_like(values, dtype=torch.bool).scatter(1, group, True)
            values = values.masked_fill(needed & (self._given[:, :1] != UNKNOWN), float("inf"))
        return function(values, *rest, **named)


def _shares(values: Tensor) -> Tensor:
    return values / values.sum(-1, keepdim=True).clamp(min=torch.finfo(values.dtype).tiny)
