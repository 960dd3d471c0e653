"""Run a Hugging Face causal LM by its own forward, with attention replaced by one over the slot cache.

    engine --tokens of all rows as one row [1, T]--> model.forward --per layer--> `slot_attention` <--> KVCache

Tokens mix in attention, and in layers that carry a state (`hone.rollout.builtin.states`). The constructor refuses
models with other token mixing, and attention features that `slot_attention` does not have.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hone.models.attention.adapting import adapt, choose_in_current_row
from hone.models.attention.indexed import AnyMask, Queries, indexers
from hone.models.attention.packed import (
    AttentionWindow,
    Scoring,
    chunk_of,
    packed,
    packed_attention_forward,
    packed_mask,
    window_of,
)
from hone.models.attention.shapes import AttentionShape, Call, shapes_of
from hone.models.attention.stateful import unknown_states
from hone.models.attention.support import obstacle
from hone.models.attention.temperature import SCALES, scaled_by_position
from hone.models.errors import ModelError
from hone.models.numerics.fused_norm import fuse_norms
from hone.models.numerics.precision import hold_in
from hone.models.rotary import fix_rotary
from hone.models.routing import Routers
from hone.models.vision.model import attention_names, auto_class, hidden_states
from hone.rollout.builtin import indexed
from hone.rollout.builtin.cache import Addresses, CacheShape, KVCache, PackedPrompts, Step
from hone.rollout.builtin.scoring import Following, following_logprobs
from hone.rollout.builtin.states import StateCache, Work, keep_states

MOST_LOGITS = 2**29  # 2 GiB in float32; of a model whose head cannot be run apart
_WITH_ATTENTION = ("full_attention", "sliding_attention", "hybrid", "hybrid_sliding")  # kinds of layers, beside a state
SLOTS = "hone_slots"  # the name of `slot_attention` in transformers' registries


@dataclass(frozen=True, slots=True)
class _Place:
    """Place in the cache that one call of attention reads, counted from the first call of a forward."""

    layer: int  # of the cache
    shape: AttentionShape


@dataclass(slots=True)
class _Forward:
    """State of the current forward, for the attention function."""

    tokens: int  # in this forward, without padding
    cache: KVCache | None = None  # None in `_find_places` and in scores
    at: Addresses | None = None  # of the tokens in the cache
    step: Step | None = None  # None in prefill
    prompts: PackedPrompts | None = None  # of a prefill
    places: tuple[_Place, ...] = ()  # of each call, with a cache
    calls: int = 0
    choices: int = 0  # of indexers so far
    index_layer: int = 0  # of the cache, for the first indexer
    seen: list[Call] | None = None  # queries, keys and values of each call: `_find_places`


_CURRENT: ContextVar[_Forward] = ContextVar("hone_slots_forward")


def _work() -> Work | None:
    """The work of the current forward for layers with a state; None if it uses no cache."""
    forward = _CURRENT.get(None)
    if forward is None or forward.cache is None:
        return None
    assert isinstance(forward.cache, StateCache)
    return Work(forward.cache, forward.prompts, forward.step)


class _Body:
    """Stands in for a model's body: it is run once, and then the head gets a few of its states at a time."""

    states: Tensor  # [T, H], of the body's one run

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.was_called = False
        self._forward = forward
        self._output: Any = None
        self._rows: Tensor | None = None

    def __call__(self, *args: Any, **asked: Any) -> Any:
        if not self.was_called:
            self.was_called = True
            self._output = self._forward(*args, **asked)
            self.states = self._output.last_hidden_state[0]
            self._rows = self.states[:1]
        assert self._rows is not None
        self._output.last_hidden_state = self._rows[None]
        return self._output

    def head_on(self, forward: Callable[[], Tensor], rows: Tensor) -> Tensor:
        """The logits of `rows` of the states, by the model's `forward`."""
        self._rows = rows
        return forward()


@contextmanager
def _body_of(model: PreTrainedModel) -> Iterator[_Body]:
    """While this lasts, a `_Body` stands in for the model's body."""
    body = _Body(model.base_model.forward)
    model.base_model.forward = body
    try:
        yield body
    finally:
        del model.base_model.forward  # the class has it


@contextmanager
def _during(forward: _Forward) -> Iterator[None]:
    token = _CURRENT.set(forward)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: AttentionWindow | AnyMask | None,
    scaling: float | None = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers: [1, heads, T, d] and so on -> [1, T, heads, value_size]."""
    forward = _CURRENT.get()
    if forward.seen is not None:
        forward.seen.append((query, key, value))
    if forward.cache is None:
        return packed_attention_forward(module, query, key, value, attention_mask, scaling, **asked)
    # The call, not `layer_idx`: a layer may call twice (DiffLlama), or run several times (HRM).
    place, tokens = forward.places[forward.calls], forward.tokens
    forward.calls += 1
    if place.shape.cached:
        assert forward.at is not None
        written = (x[0, :, :tokens].transpose(0, 1) for x in (key, value))
        forward.cache.write(place.layer, forward.at, *written)
    if getattr(module, SCALES, False):
        query = scaled_by_position(module, query)
    scoring = Scoring(
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=window_of(attention_mask, asked.get("sliding_window")),
        chunk=chunk_of(attention_mask),
        softcap=asked.get("softcap"),
        sinks=asked.get("s_aux"),
        chosen=asked.get("indices"),
    )
    if forward.prompts is not None and scoring.chosen is not None:
        out = indexed.attend_prompts(forward.cache, place.layer, query, forward.prompts, scoring)
        return out.transpose(1, 2).contiguous(), None
    if forward.prompts is not None:
        out = forward.cache.attend_prompts(place.layer, query, key, value, forward.prompts, scoring)
        return out.transpose(1, 2).contiguous(), None
    assert forward.step is not None
    out = forward.cache.attend(place.layer, query[0, :, :tokens].transpose(0, 1), forward.step, scoring)
    out = F.pad(out, (0, 0, 0, query.shape[2] - tokens))
    return out.unflatten(1, (query.shape[1], -1))[None], None


def _choose(queries: Queries) -> list[Tensor]:
    """The keys that an indexer chooses in the current forward."""
    forward = _CURRENT.get()
    if forward.cache is None or forward.at is None:
        return choose_in_current_row(queries)
    layer = forward.index_layer + forward.choices
    forward.choices += 1
    if forward.step is not None:
        return indexed.choose_in_step(queries, forward.cache, layer, forward.at, forward.step)
    assert forward.prompts is not None
    return indexed.choose_in_prompts(queries, forward.cache, layer, forward.at, forward.prompts)


ALL_ATTENTION_FUNCTIONS.register(SLOTS, slot_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(SLOTS, packed_mask)


def _places(forward: _Forward) -> Iterator[_Place]:
    """Places in the cache, one for each call of a forward."""
    calls = shapes_of(forward.seen or [])
    groups: dict[tuple[int, int, int], list[int]] = {}  # the cache numbers layers of one shape consecutively
    for call, (shape, _) in enumerate(calls):
        if shape.cached:
            groups.setdefault(shape.cache_key, []).append(call)
    layers = {call: layer for layer, call in enumerate(itertools.chain(*groups.values()))}
    return (_Place(layers[source], shape) for shape, source in calls)


class GenericDecoder:
    """`Decoder` for a transformers model of any architecture."""

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
        with no_init_weights(), torch.device(device):
            kind = config.model_type
            model: PreTrainedModel = auto_class(kind).from_config(
                copy.deepcopy(config), dtype=dtype, attn_implementation=attention_names(kind, SLOTS)
            )
        model.tie_weights()
        hold_in(model, dtype)
        fuse_norms(model)  # rounds as the trainer does
        adapt(model, _choose)
        fix_rotary(model, getattr(config, "run_context", None), type(model).__name__)
        self._states = bool(keep_states(model, _work))
        reason = obstacle(config, type(model)) or unknown_states(model)
        if reason:
            raise ValueError(f"the built-in engine cannot run {type(model).__name__}: {reason}")
        self._model = model.eval().requires_grad_(False)
        self._weights: dict[str, Tensor] = model.state_dict()
        self._device = device
        self._places, self.cache_shapes = self._find_places()
        self._index_layer = sum(place.shape.cached for place in self._places)
        self.routers = self._find_routers()

    def _find_places(self) -> tuple[tuple[_Place, ...], tuple[CacheShape, ...]]:
        """Run one token through the model, with any weights, and record what each call of its attention caches."""
        name = type(self._model).__name__
        prompts = PackedPrompts.of([(0,)], [0], self._device)
        forward = _Forward(tokens=1, seen=[])
        try:
            self._run(prompts, forward)
        except NotImplementedError as error:
            raise ValueError(f"the built-in engine cannot run {name}: {error}") from error
        places = tuple(_places(forward))
        kinds = getattr(self._model.config.get_text_config(), "layer_types", None) or []
        layers = sum(kind in _WITH_ATTENTION for kind in kinds) if self._states else max(len(places), 1)
        if len(places) != layers:
            raise ValueError(
                f"the built-in engine cannot run {name}: of its layers with attention ({layers}), {len(places)} have "
                "it in a form that hone can replace"
            )
        counts = Counter(one.shape.cache_key for one in places if one.shape.cached)
        counts.update((1, one.head_dim, 0) for one in indexers(self._model))
        shapes = [CacheShape(count, *sizes, carries_state=self._states) for sizes, count in counts.items()]
        return places, tuple(shapes) or (CacheShape(0, 1, 1, 1, carries_state=True),)

    def _find_routers(self) -> Routers | None:
        """Return the routers of a mixture of experts, if their choices can be recorded."""
        prompts = PackedPrompts.of([(0, 1)], [0], self._device)
        try:
            routers = Routers.find(self._model)
            if routers is not None:
                routers.check(lambda: self._run(prompts, _Forward(tokens=2)), type(self._model).__name__)
        except ModelError:  # it can generate, but refuses requests for routed experts
            return None
        return routers

    def weights(self) -> Mapping[str, Tensor]:
        return self._weights

    def prefill(self, prompts: PackedPrompts, cache: KVCache) -> None:
        tokens = prompts.rows.shape[0]
        at = cache.addresses(prompts.rows, prompts.positions[:tokens])
        forward = _Forward(tokens, cache, at, prompts=prompts, places=self._places, index_layer=self._index_layer)
        self._run(prompts, forward)

    def _run(self, prompts: PackedPrompts, forward: _Forward) -> None:
        with torch.inference_mode(), _during(forward), packed(prompts.packing):
            turned = prompts.positions if prompts.turned is None else prompts.turned
            hidden_states(self._model.base_model, prompts.token_ids, turned, prompts.images)

    def score(self, prompts: PackedPrompts, temperature: float, top_k: int = 0) -> Following:
        """See `Decoder`. The model's own head computes the logits, of a few tokens at a time if it can be run apart.

        Raises ValueError for more than `MOST_LOGITS` if it cannot.
        """
        tokens = prompts.rows.shape[0]
        with torch.inference_mode(), _during(_Forward(tokens)), packed(prompts.packing):
            if self._head_runs_apart:
                with _body_of(self._model) as body:
                    self._logits(prompts)
                    head = partial(body.head_on, lambda: self._logits(prompts))
                    return following_logprobs(prompts, body.states, head, temperature, top_k)
            size = tokens * self._model.config.get_text_config().vocab_size
            if size > MOST_LOGITS:
                raise ValueError(
                    f"the built-in engine cannot score {tokens} tokens with {type(self._model).__name__}, whose head "
                    f"cannot be run apart: all {size} logits would be in memory at once; at most {MOST_LOGITS} may be"
                )
            return following_logprobs(prompts, self._logits(prompts), lambda logits: logits, temperature, top_k)

    @cached_property
    def _head_runs_apart(self) -> bool:
        """Return whether the model's forward calls its body as a whole, which OPT's does not."""
        prompts = PackedPrompts.of([(0,)], [0], self._device)
        with torch.inference_mode(), _during(_Forward(tokens=1)), packed(prompts.packing):
            with _body_of(self._model) as body:
                self._logits(prompts)
            return body.was_called

    def _logits(self, prompts: PackedPrompts) -> Tensor:
        output = self._model(input_ids=prompts.token_ids[None], position_ids=prompts.positions[None], use_cache=False)
        logits: Tensor = output.logits[0]
        return logits

    def decode(self, step: Step, cache: KVCache) -> Tensor:
        at = cache.addresses(torch.arange(step.rows, device=self._device), step.positions[: step.rows])
        forward = _Forward(step.rows, cache, at, step, places=self._places, index_layer=self._index_layer)
        with _during(forward):
            output = self._model(input_ids=step.token_ids[None], position_ids=step.turned[None], use_cache=False)
        logits: Tensor = output.logits[0, : step.rows]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))
