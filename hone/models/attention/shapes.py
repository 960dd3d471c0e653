"""Sizes of a model's attention and of what its backward keeps, from a forward on the meta device: no weights, no work.

empty model --one forward, attention replaced--> heads and sizes of each call, in the order of the layers
            --the same with autograd-----------> bytes that the backward keeps for a token
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hone.models.attention.adapting import adapt
from hone.models.attention.packed import Packing, packed, packed_mask
from hone.models.attention.stateful import state_layers
from hone.models.numerics.fused_norm import FusedNorm, fuse_norms
from hone.models.vision.model import attention_names

NOTED = "hone_noted"  # the name of `_noted` in transformers' registries
SHORT, LONG = 64, 192  # tokens of two forwards, whose difference is what a token keeps
NEEDS_VALUES = (RuntimeError, NotImplementedError, TypeError, AttributeError, KeyError, ValueError)
"""Errors of a forward on the meta device that depends on the values of weights or tokens."""

Call = tuple[Tensor, Tensor, Tensor]  # queries, keys and values of one attention

_CALLS: ContextVar[list[Call]] = ContextVar("hone_noted_calls")


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes of one attention of a model."""

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    cached: bool  # False: it reads the keys and values of an earlier layer (Gemma 3n, Gemma 4)

    @property
    def cache_key(self) -> tuple[int, int, int]:
        """Key of the cached tensor that the layers of these sizes share."""
        return self.kv_heads, self.key_size, self.value_size


def shapes_of(calls: Sequence[Call]) -> list[tuple[AttentionShape, int]]:
    """The shape of each call, and the number of the call whose keys it reads: layers that share keys pass them on."""
    sources = [_first(calls, call) for call in calls]
    return [
        (AttentionShape(query.shape[1], key.shape[1], key.shape[3], value.shape[3], sources[call] == call), source)
        for call, ((query, key, value), source) in enumerate(zip(calls, sources, strict=True))
    ]


def _first(calls: Sequence[Call], call: Call) -> int:
    """Number of the first call with these keys and values."""
    return next(i for i, one in enumerate(calls) if one[1] is call[1] and one[2] is call[2])


class _Kept(torch.autograd.Function):
    """An attention that computes nothing and keeps what a fused kernel keeps: its inputs and its output."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(*query.shape[:3], value.shape[3]).transpose(1, 2)
        ctx.save_for_backward(query, key, value, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError("nothing is differentiated on the meta device")


def _noted(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **asked: Any
) -> tuple[Tensor, None]:
    """Attention function for transformers: [1, heads, T, d] and so on -> [1, T, heads, value_size]."""
    _CALLS.get([]).append((query, key, value))
    return _Kept.apply(query, key, value), None  # type: ignore[no-untyped-call]


ALL_ATTENTION_FUNCTIONS.register(NOTED, _noted)
ALL_MASK_ATTENTION_FUNCTIONS.register(NOTED, packed_mask)


def attention_shapes(model: PreTrainedModel) -> tuple[AttentionShape, ...]:
    """Sizes of each attention of a model on the meta device, in the order of its calls; changes the model.

    Empty for a model whose forward needs values: whose attention is not replaceable, or depends on its weights.
    """
    adapt(model)
    for name, module in model.named_modules():
        if name.endswith("experts"):  # which tokens an expert gets depends on values; its output looks like its input
            module.forward = lambda states, *_, **__: states
    with _noting(model) as calls:
        try:
            with torch.inference_mode():
                _run(model, 1)
        except NEEDS_VALUES:
            return ()
        return tuple(shape for shape, _ in shapes_of(calls))


def kept_per_token(model: PreTrainedModel, dtype: torch.dtype) -> int:
    """Bytes that the backward of a model's body keeps for a token, after `attention_shapes`; 0: not known.

    The model is on the meta device and takes `dtype`. Experts are left out: see `attention_shapes`. Layers with a state
    are not measured, because they see one sequence at a time.
    """
    if state_layers(model):
        return 0
    model.to(dtype)  # type: ignore[arg-type]
    model.train().requires_grad_(True)
    fuse_norms(model)
    for norm in (one for one in model.modules() if "forward" in vars(one) and hasattr(one, "variance_epsilon")):
        norm.forward = types.MethodType(_norm, norm)  # on the meta device torch's own is not one kernel
    try:
        with _noting(model):
            short, long = (_kept(model, tokens) for tokens in (SHORT, LONG))
    except NEEDS_VALUES:
        return 0
    return (long - short) // (LONG - SHORT)


@contextmanager
def _noting(model: PreTrainedModel) -> Iterator[list[Call]]:
    """Replace the attention of a model, and note its calls."""
    calls: list[Call] = []
    token = _CALLS.set(calls)
    try:
        model.set_attn_implementation(attention_names(model.config.model_type, NOTED))
        yield calls
    finally:
        _CALLS.reset(token)


def _norm(self: Any, hidden_states: Tensor) -> Tensor:
    out: Tensor = FusedNorm.apply(hidden_states, self.weight, self.variance_epsilon)  # type: ignore[no-untyped-call]
    return out


def _run(model: PreTrainedModel, tokens: int) -> None:
    """Run the body over one row, from token ids or, where it looks at their values, from embeddings."""
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    states = torch.zeros(1, tokens, model.config.get_text_config().hidden_size, dtype=model.dtype, device="meta")
    with packed(Packing.of(torch.tensor([0, tokens]), device=ids.device)):
        try:
            model.base_model(input_ids=ids, position_ids=ids, use_cache=False)
        except NEEDS_VALUES:
            _CALLS.get([]).clear()
            model.base_model(inputs_embeds=states, position_ids=ids, use_cache=False)


def _kept(model: PreTrainedModel, tokens: int) -> int:
    """Bytes of all tensors that the backward of one forward would read, weights left out."""
    weights = {one.untyped_storage()._cdata for one in (*model.parameters(), *model.buffers())}
    seen: dict[int, Tensor] = {}  # the tensors, too: a storage that is freed gives its number to another

    def note(tensor: Tensor) -> Tensor:
        if (storage := tensor.untyped_storage()._cdata) not in weights:
            seen[storage] = tensor
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        _run(model, tokens)
    return sum(one.untyped_storage().nbytes() for one in seen.values())


__all__ = ["AttentionShape", "Call", "attention_shapes", "kept_per_token", "shapes_of"]
