"""Record and replay the experts of each token, in any transformers mixture of experts.

    routers = Routers.find(model)                     # once: its routers, in the order of the layers
    routing = Routing(routers, given)                 # for one forward; replays `given` [t, layers, top_k]
    with watched(routing):
        model(...)  --each router--> scores --top-k: here--> weights of the chosen experts --> experts
    routing.choices()                                 # [t, layers, top_k]

Inside `watched`, the router's call of `torch.topk` is patched: it returns the given indices and the values at these
indices. The model's own code does the rest (normalisation, scaling, gating), so replayed experts get the weights that
the router gives them now, with gradients. This works for every architecture whose routers call `topk` once;
`Routers.check` refuses others.

Replay of recorded routes: Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference
Routers" (https://arxiv.org/abs/2510.11370); Zheng et al. 2025 (https://arxiv.org/abs/2507.18071), which replays the old
policy's.
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

from hone.models.attention.packed import checkpoint_contexts as packed_contexts
from hone.models.errors import ModelError

ROUTES = "routed_experts"  # field of Batch and key in ModelOutput.extras: [T, layers, top_k] int16
UNKNOWN = -1  # instead of an expert's number: the router chooses for this token itself
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts")  # in transformers' configs

_TOP_K = {torch.topk, torch.Tensor.topk}
_SIGMOID = {torch.sigmoid, torch.Tensor.sigmoid}
_SOFTMAX = {torch.softmax, torch.Tensor.softmax, torch.nn.functional.softmax}


def expert_count(config: Any) -> int:
    """Experts per mixture layer, from the transformers config; 0 for a dense model."""
    text = config.get_text_config()
    found = [getattr(text, name, None) for name in COUNTS]
    return max((count for count in found if isinstance(count, int) and count > 1), default=0)


def mixture_layers(config: Any) -> tuple[int, ...]:
    """Indices of the mixture layers whose router can be found, from the transformers config."""
    empty: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = empty.from_config(copy.deepcopy(config))
    names = [name for name, module in model.named_modules() if _is_router(module)]
    return tuple(int(next(part for part in name.split(".") if part.isdigit())) for name in names)


@dataclass(frozen=True, slots=True)
class Routers:
    """The routers of a model. All its mixtures have the same number of experts."""

    layers: int
    experts: int
    top_k: int
    first: int = 0  # number of the first layer: above 0 in a part of a model (a pipeline stage)

    @property
    def numbers(self) -> range:
        """The numbers of the layers, among all mixture layers of the model."""
        return range(self.first, self.first + self.layers)

    @classmethod
    def find(cls, model: nn.Module, first: int = 0) -> Routers | None:
        """Find the routers of a model and patch their forwards; None if there are none. May be called again.

        `first` is the number of mixture layers before `model`, if it is a part of one. Call it after sharding, which
        also replaces forwards. Raises ModelError if the routers differ in size.
        """
        found = [module for module in model.modules() if _is_router(module)]
        sizes = {(int(module.num_experts), int(module.top_k)) for module in found}  # type: ignore[arg-type]
        if not found:
            return None
        if len(sizes) > 1:
            raise ModelError(f"its mixtures should have equal (experts, experts per token), found {sorted(sizes)}")
        for layer, module in enumerate(found, first):
            if not getattr(module.forward, "_hone_watched", False):
                module.forward = _watched_forward(module.forward, layer, module)
        ((experts, top_k),) = sizes
        return cls(len(found), experts, top_k, first)

    def check(self, run: Callable[[], Any], name: str) -> None:
        """Check that the routers use `topk` as expected; `run` sends at least two tokens through the model.

        Raises ModelError.
        """
        own = Routing(self)
        with torch.no_grad(), watched(own):
            run()
        if len(own.chosen) != self.layers:
            silent = self.layers - len(own.chosen)
            raise ModelError(f"{name}: {silent} of its {self.layers} routers do not choose experts with topk")
        others = (own.choices() + 1) % self.experts  # another choice of as many distinct experts
        replayed = Routing(self, others)
        with torch.no_grad(), watched(replayed):
            run()
        if not torch.equal(replayed.choices(), others):
            raise ModelError(f"{name}: its routers ignore replayed experts")


@dataclass(slots=True)
class Routing:
    """The routers' choices in one forward over t tokens: given ones and recorded ones."""

    routers: Routers
    given: Tensor | None = None  # [t, layers of the whole model, top_k] experts to replay; UNKNOWN: the router chooses
    chosen: dict[int, Tensor] = field(default_factory=dict)  # layer -> [t, top_k] int64
    logits: dict[int, tuple[Tensor, bool]] = field(default_factory=dict)  # layer -> [t, experts], by sigmoid?
    replaced: dict[int, Tensor] = field(default_factory=dict)  # layer -> [t] choices that were not the router's own

    def given_to(self, layer: int) -> Tensor | None:
        return None if self.given is None else self.given[:, layer].long()

    def saw(self, layer: int, choice: _Choice) -> None:
        if choice.chosen is None or choice.own is None or choice.logits is None:
            return  # `Routers.check` reports it
        self.chosen[layer] = choice.chosen
        if self.given is not None:
            self.replaced[layer] = (choice.chosen[:, :, None] != choice.own[:, None]).all(-1).sum(-1)
        self.logits[layer] = choice.logits, choice.by_sigmoid  # unchanged: the layer may be recomputed

    def scored(self) -> list[tuple[Tensor, Tensor]]:
        """The router's logits and the experts' shares of each layer, both [t, experts], with gradient.

        Shares sum to 1: the softmax of the logits, or for sigmoid routers the sigmoids divided by their sum.
        """
        found = []
        for layer in self.routers.numbers:
            logits, by_sigmoid = self.logits[layer]
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            found.append((wide, _shares(wide.sigmoid()) if by_sigmoid else wide.softmax(-1)))
        return found

    def choices(self) -> Tensor:
        """The experts of each token, [t, layers, top_k] int16, in the router's order."""
        return torch.stack([self.chosen[layer] for layer in self.routers.numbers], 1).to(torch.int16)


@dataclass(frozen=True, slots=True)
class _Again:
    """Routing of a recomputed forward in the backward pass: repeats the choices, even if rounding changed scores."""

    first: Routing

    def given_to(self, layer: int) -> Tensor | None:
        return self.first.chosen.get(layer)

    def saw(self, layer: int, choice: _Choice) -> None:
        """Do nothing: the first forward recorded it."""


_CURRENT: ContextVar[Routing | _Again | None] = ContextVar("hone_routing")


@contextmanager
def watched(routing: Routing | _Again | None) -> Iterator[None]:
    """Inside this context, routers record their choices in `routing` and replay its given ones; None: no effect."""
    token = _CURRENT.set(routing)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The `context_fn` of `torch.utils.checkpoint`: recomputation uses the forward's packing and routes."""
    first, again = packed_contexts()
    return first, _both(again, repeated())


def repeated() -> AbstractContextManager[None]:
    """A context for the recomputation of what runs now: routers repeat their choices, and nothing is recorded."""
    routing = _CURRENT.get(None)
    return watched(_Again(routing) if isinstance(routing, Routing) else routing)


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
    """Records one router's forward: its logits, their scoring function, and the chosen experts."""

    def __init__(self, experts: int, top_k: int, given: Tensor | None) -> None:
        super().__init__()
        self._experts = experts
        self._top_k = top_k
        self._given = given
        self.logits: Tensor | None = None
        self.by_sigmoid = False
        self.own: Tensor | None = None  # [t, top_k] the router's own choice
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
        """Handle a call of topk: over experts, or over groups of experts, which comes first in some routers."""
        count = rest[0] if rest else named.get("k")
        if values.shape[-1] == self._experts and count == self._top_k:
            self.own = function(values.detach(), *rest, **named)[1]
            self.chosen = self.own
            if self._given is not None:
                self.chosen = torch.where(self._given[:, :1] == UNKNOWN, self.own, self._given)
            if self.logits is None:
                self.logits = values
            # gather even without replay: a recomputation, which replays, then saves the same tensors
            return torch.return_types.topk((values.gather(-1, self.chosen), self.chosen))
        if values.shape[-1] < self._experts:  # groups, of which only the choice is used: nothing to save for a backward
            values = values.detach()
        if self._given is not None and self._experts % values.shape[-1] == 0:
            group = self._given.clamp(min=0) // (self._experts // values.shape[-1])
            needed = torch.zeros_like(values, dtype=torch.bool).scatter(1, group, True)
            values = values.masked_fill(needed & (self._given[:, :1] != UNKNOWN), float("inf"))
        return function(values, *rest, **named)


def _shares(values: Tensor) -> Tensor:
    return values / values.sum(-1, keepdim=True).clamp(min=torch.finfo(values.dtype).tiny)
