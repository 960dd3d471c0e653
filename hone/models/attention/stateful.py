"""Layers that carry a state from token to token see one sequence of a packed row at a time.

    row [1, T, H] --gather--> [n, L, H]: sequences of like length, right-padded --layer--> --gather--> row [1, T, H]

Convolutions, state-space layers (Mamba) and linear attention (gated DeltaNet, KDA, lightning attention) would carry
their state into the next sequence of a row. They are causal, so padding behind a sequence changes nothing in it. Tokens
that several sequences share (see `Packing`) are computed once, without padding, and the sequences go on from the state
behind them, with gradients. A layer whose kernel cannot begin with a state (Mamba 1, lightning attention) computes them
for each of the sequences.

Where the layer's kernels take the bounds of packed sequences (flash-linear-attention, causal-conv1d, mamba-ssm), and
the check at start-up has found that they honour them, such a layer gets whole sequences end to end in one row, without
padding, unless shared prefixes would make it longer than the batches above.

hone finds these layers by what they do: they write a convolution or recurrent state into transformers' cache. A check
at start-up proves that no other layer of the model carries one (`hone.engines.checks.isolation`).
"""

from __future__ import annotations

import functools
import inspect
import itertools
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from hone.models.attention.packed import Packing, current_packing

_WRITES = frozenset({"update_conv_state", "update_recurrent_state", "set_linear_cache"})  # methods of caches
_BOUNDS = frozenset({"seq_idx", "cu_seqlens"})  # arguments of kernels
_PADDED = 1.25  # tokens of a batch with padding, at most, for each without


def state_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Every module that writes a convolution or recurrent state into transformers' cache, by name."""
    kinds = {cls for cls in {type(module) for module in model.modules()} if _writes_state(cls)}
    return {name: module for name, module in model.named_modules() if type(module) in kinds}


def _functions(cls: type) -> Iterator[types.FunctionType]:
    """The functions of a class, without decorators."""
    found = (one for base in cls.__mro__ for one in vars(base).values() if inspect.isfunction(one))
    return (inspect.unwrap(one) for one in found)


def _writes_state(cls: type[nn.Module]) -> bool:
    return any(not _WRITES.isdisjoint(one.__code__.co_names) for one in _functions(cls))


def unknown_states(model: nn.Module) -> str:
    """Return why a model that transformers calls stateful cannot be trained; empty if its states are known."""
    if not getattr(model, "_is_stateful", False) or state_layers(model):
        return ""
    return "its layers carry a state from token to token, which would leak between packed sequences"


def separate_sequences(model: nn.Module) -> None:
    """Let every layer with a state see one sequence of a packed row at a time, in place. Others stay as they are."""
    for layer in state_layers(model).values():
        layer.forward = types.MethodType(separate, layer)


def are_separate(model: nn.Module) -> bool:
    """Return whether `separate_sequences` changed every layer with a state of this model."""
    return all(getattr(layer.forward, "__func__", None) is separate for layer in state_layers(model).values())


def takes_bounds(model: nn.Module) -> bool:
    """Return whether a kernel that a layer with a state calls has an argument for the bounds of packed sequences.

    transformers' own operations in PyTorch have none. Only a trial shows whether all kernels of a layer honour them.
    """
    return any(_kernel_takes_bounds(cls) for cls in {type(layer) for layer in state_layers(model).values()})


def _kernel_takes_bounds(cls: type) -> bool:
    for function in _functions(cls):
        for name in function.__code__.co_names:
            if inspect.isfunction(called := function.__globals__.get(name)):
                # transformers puts a kernel of another package into a wrapper, under this name
                kernel = inspect.getclosurevars(called).nonlocals.get("implementation", called)
                if not _BOUNDS.isdisjoint(inspect.signature(kernel).parameters):
                    return True
    return False


def use_bounds(model: nn.Module, use: bool) -> None:
    """Let the kernels of layers with a state separate the sequences of a row by its bounds, or no more, in place."""
    for layer in state_layers(model).values():
        layer._hone_uses_bounds = use  # type: ignore[assignment]


class Carried:
    """States of some sequences in one layer, for transformers' layers: a cache and its only layer at once."""

    record_past = False

    def __init__(self, conv: Mapping[int, Tensor | None], recurrent: Mapping[int, Tensor | None]) -> None:
        """States after the tokens so far, [n, ...] each, by transformers' `state_idx`; without any, sequences begin."""
        self.conv_states: dict[int, Tensor | None] = defaultdict(lambda: None, conv)
        self.recurrent_states: dict[int, Tensor | None] = defaultdict(lambda: None, recurrent)
        self.began_empty = all(one is None for one in (*conv.values(), *recurrent.values()))

    @property
    def layers(self) -> Carried:
        return self

    def __getitem__(self, layer: int) -> Carried:
        return self

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int = 0) -> bool:
        return not self.began_empty

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int = 0, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> Tensor:
        """Take the inputs [n, channels, L] of a convolution; return them after those that it needs from before."""
        before = self.conv_states[state_idx]
        size = conv_kernel_size or (conv_states if before is None else before).shape[-1]
        if before is None:
            seen = F.pad(conv_states, (max(size - conv_states.shape[-1], 0), 0))
        else:
            seen = torch.cat([before, conv_states], -1)
        self._set(self.conv_states, state_idx, seen[..., -size:])
        return seen

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int = 0, state_idx: int = 0) -> Tensor:
        self._set(self.recurrent_states, state_idx, recurrent_states)
        return recurrent_states

    def _set(self, states: dict[int, Tensor | None], index: int, new: Tensor) -> None:
        states[index] = new

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """MiniMax's name for its state."""
        return self.recurrent_states[0]

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.update_recurrent_state(linear_cache)


@functools.cache
def goes_on(cls: Any, token_by_token: bool = True) -> bool:
    """Return whether the layers of a class read a state also where several tokens follow it.

    Those without a recurrent state do, by transformers' call for convolutions; so do those that give it to their
    kernel, and lightning attention, `token_by_token`. Mamba 1 begins anew.
    """
    codes = [one.__code__ for one in _functions(cls)]
    called = {name for code in codes for name in code.co_names}
    if "get_linear_cache" in called:
        return token_by_token
    if "update_recurrent_state" not in called:
        return True
    keywords = {word for code in codes for one in code.co_consts if isinstance(one, tuple) for word in one}
    return not keywords.isdisjoint(("initial_state", "initial_states"))


@dataclass(frozen=True)
class Sequences:
    """The sequences of a packed row, in batches of like length."""

    batches: tuple[Tensor, ...]  # [n, L] int64 each: tokens of the row; behind its end, a sequence's last token again
    places: Tensor  # [T] int64: where each token of the row is in the batches, end to end
    begins: tuple[Tensor | None, ...]  # [n] int64 each: the prefix from which each sequence goes on; None: it begins
    prefixes: int = 0  # so many batches are prefixes, which are counted through them and have no padding
    lengths: tuple[int, ...] = ()  # of sequences that are end to end in the only batch

    @classmethod
    def of(cls, packing: Packing) -> Sequences:
        """Whole sequences: a prefix that several share is in each of them; its tokens are read from one."""
        whole = _whole(packing)
        groups = [(group, None) for group in _alike(whole, packing.num_tokens)]
        return cls._laid_out([([whole[i] for i in group], begin) for group, begin in groups], packing)

    @classmethod
    def end_to_end(cls, packing: Packing) -> Sequences:
        """Whole sequences in one row, for kernels that take their bounds."""
        whole = _whole(packing)
        row = cls._laid_out([([np.concatenate(whole)], None)], packing)
        return replace(row, lengths=tuple(len(one) for one in whole))

    @cached_property
    def bounds(self) -> dict[str, Tensor]:
        """`lengths` as kernels want them: the number of each token's sequence [1, T], and the ends [N+1]; int32."""
        lengths = torch.tensor(self.lengths)
        number = torch.repeat_interleave(torch.arange(len(lengths)), lengths)[None]
        both = {"seq_idx": number, "cu_seqlens": F.pad(lengths.cumsum(0), (1, 0))}
        return {name: one.to(self.places.device, torch.int32) for name, one in both.items()}

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed, with padding."""
        return sum(batch.numel() for batch in self.batches)

    @classmethod
    def going_on(cls, packing: Packing) -> Sequences:
        """Prefixes first, and then what goes on from them or begins."""
        segments, prefixes = _segments(packing)
        by_length = sorted(prefixes, key=packing.lengths.__getitem__)
        first = [[*same] for _, same in itertools.groupby(by_length, packing.lengths.__getitem__)]
        number = {segment: place for place, segment in enumerate(itertools.chain(*first))}
        batches: list[_Batch] = [([segments[i] for i in group], None) for group in first]
        for shared in (True, False):
            kept = [i for i, one in enumerate(packing.parents) if i not in prefixes and (one is not None) == shared]
            for group in _alike([segments[i] for i in kept], packing.num_tokens):
                chosen = [kept[place] for place in group]
                begin = [number[parent] for i in chosen if (parent := packing.parents[i]) is not None]
                batches.append(([segments[i] for i in chosen], begin or None))
        return cls._laid_out(batches, packing, len(first))

    @classmethod
    def _laid_out(cls, batches: Sequence[_Batch], packing: Packing, prefixes: int = 0) -> Sequences:
        places = np.empty(packing.num_tokens, np.int64)
        found: list[Tensor] = []
        begins: list[Tensor | None] = []
        start = 0
        device = packing.cu_seqlens.device
        for batch, begin in batches:
            # a single token behind a state would be a step of decoding, which changes the state in place
            width = max(len(batch[0]), 1 if begin is None else 2)
            index = np.stack([np.pad(tokens, (0, width - len(tokens)), "edge") for tokens in batch])
            for row, tokens in enumerate(batch):
                places[tokens] = start + row * width + np.arange(len(tokens))
            found.append(torch.from_numpy(index).to(device))
            begins.append(None if begin is None else torch.tensor(begin, device=device))
            start += index.size
        return cls(tuple(found), torch.from_numpy(places).to(device), tuple(begins), prefixes)


_Tokens = NDArray[np.int64]
_Batch = tuple[list[_Tokens], list[int] | None]  # longest first; the prefixes from which they go on


def _segments(packing: Packing) -> tuple[list[_Tokens], set[int]]:
    """Tokens of each segment of a row, and which segments are prefixes."""
    ends = np.cumsum(packing.lengths)
    segments = [np.arange(end - length, end) for end, length in zip(ends, packing.lengths, strict=True)]
    return segments, {parent for parent in packing.parents if parent is not None}


def _whole(packing: Packing) -> list[_Tokens]:
    """Tokens of each sequence, with its prefix."""
    segments, prefixes = _segments(packing)
    return [
        segment if parent is None else np.concatenate([segments[parent], segment])
        for number, (segment, parent) in enumerate(zip(segments, packing.parents, strict=True))
        if number not in prefixes
    ]


def _alike(sequences: Sequence[_Tokens], most: int) -> Iterator[list[int]]:
    """Batches of sequences, longest first, with little padding and at most `most` tokens or one sequence."""
    batch: list[int] = []
    tokens = 0
    for index in sorted(range(len(sequences)), key=lambda i: len(sequences[i]), reverse=True):
        length = len(sequences[index])
        padded = (len(batch) + 1) * len(sequences[batch[0]]) if batch else 0
        if padded > min(most, _PADDED * (tokens + length)):
            yield batch
            batch, tokens = [], 0
        batch.append(index)
        tokens += length
    if batch:
        yield batch


def own_forward(layer: nn.Module, *args: Any, **asked: Any) -> Any:
    """Run the forward of a layer's class.

    Lightning attention (MiniMax) multiplies by decays that stay in float32 (`hone.models.precision`), and transformers
    does not cast the products back.
    """
    if not hasattr(layer, "slope_rate"):
        return type(layer).forward(layer, *args, **asked)
    weight = next(layer.parameters())
    narrow = weight.dtype in (torch.bfloat16, torch.float16)
    with torch.autocast(weight.device.type, weight.dtype if narrow else torch.bfloat16, enabled=narrow):
        return type(layer).forward(layer, *args, **asked)


def separate(layer: nn.Module, *args: Any, **asked: Any) -> Any:
    """Run a layer's own forward over each batch of whole sequences; arguments and results that are rows are converted.

    Raises NotImplementedError under sequence parallelism, where a rank has a slice of each row.
    """
    packing = current_packing()
    if packing is None or (len(packing.lengths) == 1 and packing.ranks is None):
        return own_forward(layer, *args, **asked)
    if packing.ranks is not None:
        raise NotImplementedError(
            f"{type(layer).__name__} carries a state from token to token, which hone does not hand from rank to rank; "
            "leave parallel.sequence at 1"
        )
    cls: Any = type(layer)
    handed = any(parent is not None for parent in packing.parents) and goes_on(cls, token_by_token=False)
    ways = [("going on", Sequences.going_on) if handed else ("sequences", Sequences.of)]
    if getattr(layer, "_hone_uses_bounds", False):
        ways.insert(0, ("end to end", Sequences.end_to_end))
    for key, make in ways:
        if key not in packing.layouts:
            packing.layouts[key] = make(packing)
    layout: Sequences = min((packing.layouts[key] for key, _ in ways), key=lambda one: one.num_tokens)
    given = dict(zip(inspect.signature(cls.forward).parameters, (layer, *args), strict=False)) | asked
    del given[next(iter(given))]  # the layer itself
    results: list[Any] = []
    states: list[Carried] = []  # behind the prefixes
    for number, (batch, begin) in enumerate(zip(layout.batches, layout.begins, strict=True)):
        call = each_tensor(given, functools.partial(_laid_out, batch=batch, row=(1, packing.num_tokens)))
        if number < layout.prefixes or begin is not None:
            carried = Carried({}, {}) if begin is None else _chosen(states, begin)
            call |= {cache_argument(cls): carried}
            if begin is None:
                states.append(carried)
        if layout.lengths:
            call |= _named(cls, layout.bounds)
        results.append(own_forward(layer, **call))
    return _joined(results, layout)


def _named(cls: Any, bounds: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The bounds by the names that the forward of a class takes, or passes on to its kernels."""
    parameters = inspect.signature(cls.forward).parameters
    if all(one.kind is not inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return {name: one for name, one in bounds.items() if name in parameters}
    renames = any("cu_seq_lens_q" in one.__code__.co_consts for one in _functions(cls))
    return {"cu_seq_lens_q" if renames and name == "cu_seqlens" else name: one for name, one in bounds.items()}


CACHES = ("cache_params", "past_key_values")  # names of the argument


@functools.cache
def cache_argument(cls: Any) -> str:
    """Return the name by which the forward of a layer with a state takes its cache."""
    parameters = inspect.signature(cls.forward).parameters
    return next(name for name in CACHES if name in parameters)


def _laid_out(tensor: Tensor, batch: Tensor, row: tuple[int, int]) -> Tensor:
    """A tensor of the row as one of a batch of sequences; others as they are."""
    if tensor.shape[:2] != row:
        return tensor
    return tensor[0].index_select(0, batch.flatten()).view(*batch.shape, *tensor.shape[2:])


def _chosen(states: Sequence[Carried], begin: Tensor) -> Carried:
    """The states behind these prefixes, which are counted through the batches."""

    def of(parts: Sequence[Mapping[int, Tensor | None]]) -> dict[int, Tensor | None]:
        found = {key: [one for part in parts if (one := part[key]) is not None] for key in parts[0]}
        return {key: torch.cat(one).index_select(0, begin) for key, one in found.items() if one}

    return Carried(of([one.conv_states for one in states]), of([one.recurrent_states for one in states]))


def each_tensor(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with each of its tensors changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: each_tensor(one, change) for key, one in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(each_tensor(one, change) for one in value)
    return value


def _joined(results: Sequence[Any], layout: Sequences) -> Any:
    """One row from the results of the batches; None for what is not a result per token, as a final state."""
    first = results[0]
    if isinstance(first, tuple):
        return tuple(_joined(parts, layout) for parts in zip(*results, strict=True))
    batches = zip(results, layout.batches, strict=True)
    if not isinstance(first, Tensor) or any(one.shape[:2] != batch.shape for one, batch in batches):
        return None
    flat = [result.flatten(0, 1) for result in results]
    return (flat[0] if len(flat) == 1 else torch.cat(flat)).index_select(0, layout.places)[None]
