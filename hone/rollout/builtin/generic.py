"""Run a Hugging Face causal LM by its own forward, with attention replaced by one over the slot cache.

    engine --tokens of all rows as one row [1, T]--> model.forward --per layer--> `slot_attention` <--> KVCache

Tokens mix in attention, and in layers that carry a state (`hone.rollout.builtin.states`). The constructor refuses
models with other token mixing, and attention features that `slot_attention` does not have.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hone.models.attention.packed import Scoring, Window, packed, packed_attention_forward, packed_mask
from hone.models.errors import ModelError
from hone.models.precision import hold_in
from hone.models.rotary import fix_rotary
from hone.models.routing import Routers
from hone.models.vision.model import attention_names, auto_class, hidden_states
from hone.rollout.builtin.cache import CacheShape, KVCache, PackedPrompts, Step
from hone.rollout.builtin.scoring import Following, following_logprobs
from hone.rollout.builtin.states import StateCache, Work, keep_states

MOST_LOGITS = 2**29  # 2 GiB in float32; of a model whose head cannot be run apart
_WITH_ATTENTION = ("full_attention", "sliding_attention", "hybrid", "hybrid_sliding")  # kinds of layers, beside a state
SLOTS = "hone_slots"  # the name of `slot_attention` in transformers' registries


@dataclass(slots=True)
class _Forward:
    """State of the current forward, for the attention function."""

    tokens: int  # in this forward, without padding
    cache: KVCache | None = None  # None in `_find_shape`
    at: Tensor | None = None  # `cache.addresses` of the tokens
    step: Step | None = None  # None in prefill
    prompts: PackedPrompts | None = None  # of a prefill
    places: Mapping[int, int] = field(default_factory=dict)  # layer of the model -> of the cache
    seen: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # layer -> KV heads, key and value size


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
    attention_mask: Window | None,
    scaling: float | None = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers: [1, heads, T, d] and so on -> [1, T, heads, value_size]."""
    forward = _CURRENT.get()
    layer: int = module.layer_idx  # type: ignore[assignment]
    forward.seen[layer] = (key.shape[1], key.shape[3], value.shape[3])
    tokens = forward.tokens
    layer = forward.places.get(layer, layer)
    if forward.cache is not None and forward.at is not None:
        written = (x[0, :, :tokens].transpose(0, 1) for x in (key, value))
        forward.cache.write(layer, forward.at, *written)
    if forward.cache is None:
        return packed_attention_forward(module, query, key, value, attention_mask, scaling, **asked)
    scoring = Scoring(
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=attention_mask.size if attention_mask is not None else asked.get("sliding_window"),
        softcap=asked.get("softcap"),
        sinks=asked.get("s_aux"),
    )
    if forward.prompts is not None:
        out = forward.cache.attend_prompts(layer, query, key, value, forward.prompts, scoring)
        return out.transpose(1, 2), None
    assert forward.step is not None
    out = forward.cache.attend(layer, query[0, :, :tokens].transpose(0, 1), forward.step, scoring)
    out = F.pad(out, (0, 0, 0, query.shape[2] - tokens))
    return out.unflatten(1, (query.shape[1], -1))[None], None


ALL_ATTENTION_FUNCTIONS.register(SLOTS, slot_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(SLOTS, packed_mask)


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
        fix_rotary(model, getattr(config, "run_context", None), type(model).__name__)
        self._states = bool(keep_states(model, _work))
        if not self._states and not getattr(model, "_supports_attention_backend", False):
            raise ValueError(f"the built-in engine cannot run {type(model).__name__}: its attention is not replaceable")
        if getattr(model, "_is_stateful", False) and not self._states:
            raise ValueError(
                f"the built-in engine cannot run {type(model).__name__}: its layers carry a state in a way that hone "
                "does not know"
            )
        self._model = model.eval().requires_grad_(False)
        self._weights: dict[str, Tensor] = model.state_dict()
        self._device = device
        self.cache_shape = self._find_shape()
        self.routers = self._find_routers()

    def _find_shape(self) -> CacheShape:
        """Run one token through the model, with any weights, and record the shapes that its attention uses."""
        name = type(self._model).__name__
        text = self._model.config.get_text_config()
        layers = text.num_hidden_layers
        prompts = PackedPrompts.of([(0,)], [0], self._device)
        forward = _Forward(tokens=1)
        try:
            self._run(prompts, forward)
        except NotImplementedError as error:
            raise ValueError(f"the built-in engine cannot run {name}: {error}") from error
        self._places = {layer: place for place, layer in enumerate(sorted(forward.seen))}
        if self._states:
            layers = sum(kind in _WITH_ATTENTION for kind in getattr(text, "layer_types", None) or [])
        if self._states and not forward.seen and not layers:
            return CacheShape(0, 1, 1, 1, carries_state=True)
        if len(forward.seen) != layers or len(set(forward.seen.values())) != 1:
            raise ValueError(
                f"the built-in engine cannot run {name}: of its {layers} layers with attention, {len(forward.seen)} "
                "have it in plain form, with (KV heads, key size, value size) "
                f"{sorted(set(forward.seen.values()))}; expected one attention per layer, all of one shape"
            )
        return CacheShape(layers, *next(iter(forward.seen.values())), carries_state=self._states)

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
        self._run(prompts, _Forward(tokens, cache, at, prompts=prompts, places=self._places))

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
        with _during(_Forward(step.rows, cache, at, step, places=self._places)):
            output = self._model(input_ids=step.token_ids[None], position_ids=step.turned[None], use_cache=False)
        logits: Tensor = output.logits[0, : step.rows]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))
