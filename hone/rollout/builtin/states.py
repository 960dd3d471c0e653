"""States of convolutions and recurrent layers in the built-in engine: a row for each running sequence.

    prefill    prompts of one length --layer--> outputs, and the state after each prompt's last token --> its row
    decode     rows --layer, one token each--> outputs; the rows then hold the new states

A layer writes its state by transformers' calls for caches (`hone.models.attention.stateful`), so `Rows` stands in for
a cache. A state cannot be cut back to fewer tokens. So only requests that begin together share a prefill of their
prompt, and nothing is kept between the turns of an episode.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.models.attention.stateful import each_tensor, own_forward, separate, state_layers
from hone.models.transformers_patches import limit_single_steps, step_limit
from hone.rollout.builtin.cache import MINIMUM_ROWS, CacheLimits, CacheShapes, KVCache, PackedPrompts, Step

RunFn = Callable[["Rows", Callable[[Tensor], Tensor]], Any]
"""Runs a layer over rows; the function changes each tensor of its arguments."""

_CACHE_ARGUMENTS = ("cache_params", "past_key_values")


class Rows:
    """The states of some rows of one layer, for transformers' layers: a cache and its only layer at once."""

    record_past = False

    def __init__(self, conv: Tensor | None = None, recurrent: Tensor | None = None) -> None:
        """States after the tokens so far, which decoding changes in place; None: the rows begin."""
        self.conv_states, self.recurrent_states = {0: conv}, {0: recurrent}
        self.began_empty = conv is None and recurrent is None

    @property
    def kept(self) -> tuple[Tensor | None, Tensor | None]:
        """The states after the last token, [n, ...] each."""
        return self.conv_states[0], self.recurrent_states[0]

    @property
    def layers(self) -> Rows:
        return self

    def __getitem__(self, layer: int) -> Rows:
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
            self.conv_states[state_idx] = seen[..., -size:].clone()
        else:
            seen = torch.cat([before, conv_states], -1)
            before.copy_(seen[..., -size:])
        return seen

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int = 0, state_idx: int = 0) -> Tensor:
        before = self.recurrent_states[state_idx]
        if before is None:
            self.recurrent_states[state_idx] = recurrent_states
        else:
            before.copy_(recurrent_states)
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """MiniMax's name for its state."""
        return self.recurrent_states[0]

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.update_recurrent_state(linear_cache)


class StateCache(KVCache):
    """A KV cache with the states of the rows. Memory of a layer's states is taken when it first writes one."""

    copies_running = False  # a running row's state is beyond the prompt that it would share

    def __init__(self, shapes: CacheShapes, limits: CacheLimits, dtype: torch.dtype, device: torch.device) -> None:
        self._states: dict[str, tuple[Tensor | None, Tensor | None]] = {}  # layer -> convolution, recurrent [rows, ...]
        super().__init__(shapes, replace(limits, kept_tokens=0), dtype, device)

    @property
    def bytes(self) -> int:
        return super().bytes + sum(one.nbytes for one in self._tensors())

    def _tensors(self) -> list[Tensor]:
        return [one for pair in self._states.values() for one in pair if one is not None]

    def release(self) -> None:
        self._states.clear()
        super().release()

    def reserve(self, rows: int, columns: int, live_rows: int) -> None:
        super().reserve(rows, columns, live_rows)
        needed = max(self.rows, MINIMUM_ROWS)
        if not live_rows:
            self._states.clear()
        for name, (conv, recurrent) in self._states.items():
            self._states[name] = _grown(conv, needed), _grown(recurrent, needed)

    def copy_row(self, source: int, targets: Tensor, columns: int) -> None:
        super().copy_row(source, targets, columns)
        for one in self._tensors():
            one[targets] = one[source].clone()  # torch refuses to write a tensor from a view of itself

    def move_row(self, source: int, target: int, columns: int) -> None:
        super().move_row(source, target, columns)
        for one in self._tensors():
            one[target] = one[source]

    def write_states(self, name: str, rows: Tensor, states: tuple[Tensor | None, Tensor | None]) -> None:
        """Set a layer's states of some rows; states [n, ...] each."""
        if name not in self._states:
            count = max(self.rows, MINIMUM_ROWS)
            conv, recurrent = (None if one is None else one[:0] for one in states)
            self._states[name] = _grown(conv, count), _grown(recurrent, count)
        for stored, new in zip(self._states[name], states, strict=True):
            if stored is not None and new is not None:
                stored[rows] = new

    def states_of(self, name: str, count: int, begin: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """A layer's states of the first `count` rows, zero where `begin` [count] says so; changes to them stay."""
        conv, recurrent = self._states.get(name, (None, None))
        return _from_zero(conv, count, begin), _from_zero(recurrent, count, begin)


def _from_zero(state: Tensor | None, count: int, begin: Tensor) -> Tensor | None:
    """The first rows of a state, set to zero where they begin."""
    if state is None:
        return None
    return state[:count].masked_fill_(begin.view(-1, *[1] * (state.dim() - 1)), 0)


def _grown(state: Tensor | None, rows: int) -> Tensor | None:
    if state is None or len(state) >= rows:
        return state
    return torch.cat([state, state.new_zeros(rows - len(state), *state.shape[1:])])


@dataclass(frozen=True, slots=True)
class Work:
    """The forward that runs now: the cache, and the prompts or the decode step whose rows it writes."""

    cache: StateCache
    prompts: PackedPrompts | None = None
    step: Step | None = None


def keep_states(model: nn.Module, current: Callable[[], Work | None]) -> tuple[str, ...]:
    """Let every layer with a state read and write rows of a cache, in place. Returns the names of these layers.

    `current` gives the work of the running forward. Without one, the layers see one sequence of its packed row at a
    time (`hone.models.attention.stateful`).
    """
    layers = state_layers(model)
    for name, layer in layers.items():
        limit_single_steps(layer)
        parameters = tuple(inspect.signature(layer.forward).parameters)
        layer.forward = types.MethodType(_forward_of(name, parameters, current), layer)
    return tuple(layers)


def _forward_of(name: str, parameters: tuple[str, ...], current: Callable[[], Work | None]) -> Callable[..., Any]:
    argument = next(one for one in _CACHE_ARGUMENTS if one in parameters)

    def forward(self: nn.Module, *args: Any, **asked: Any) -> Any:
        work = current()
        if work is None:
            return separate(self, *args, **asked)
        given = dict(zip(parameters, args, strict=False)) | asked

        def run(rows: Rows, change: Callable[[Tensor], Tensor]) -> Any:
            with step_limit(getattr(self, "time_step_limit", None)):
                return own_forward(self, **(each_tensor(given, change) | {argument: rows}))

        if work.step is not None:
            return _decode(run, work.cache, name, work.step)
        assert work.prompts is not None
        return _prefill(run, work.cache, name, work.prompts)

    return forward


def _prefill(run: RunFn, cache: StateCache, name: str, prompts: PackedPrompts) -> Any:
    """Run the prompts of each length together, and keep the states after their last tokens."""
    total = len(prompts.token_ids)
    results = []
    start = 0
    for part in prompts.runs:
        shape = (len(part.rows), part.length)
        end = start + part.length * len(part.rows)

        def of_part(tensor: Tensor, first: int = start, last: int = end, shape: tuple[int, int] = shape) -> Tensor:
            return tensor[0, first:last].unflatten(0, shape) if tensor.shape[:2] == (1, total) else tensor

        rows = Rows()
        results.append((run(rows, of_part), shape))
        cache.write_states(name, part.rows, rows.kept)
        start = end
    return _row(results, total)


def _decode(run: RunFn, cache: StateCache, name: str, step: Step) -> Any:
    """Run one token of each row; its states change in place. Rows beyond those of the step are padding."""
    count = len(step.token_ids)
    rows = Rows(*cache.states_of(name, count, step.positions == 0))  # a row begins, or is padding

    def as_rows(tensor: Tensor) -> Tensor:
        return tensor.transpose(0, 1) if tensor.shape[:2] == (1, count) else tensor

    found = run(rows, as_rows)
    if rows.began_empty:
        cache.write_states(name, torch.arange(count, device=cache.device), rows.kept)
    return _row([(found, (count, 1))], count)


def _row(results: list[tuple[Any, tuple[int, int]]], total: int) -> Any:
    """One row [1, total, ...] from results [n, L, ...] of several calls, zeros behind; None for other results."""
    first, shape = results[0]
    if isinstance(first, tuple):
        return tuple(_row([(one[i], shape) for one, shape in results], total) for i in range(len(first)))
    if not isinstance(first, Tensor) or first.shape[:2] != shape:
        return None
    flat = torch.cat([one.flatten(0, 1) for one, _ in results])
    return F.pad(flat, (*(0, 0) * (flat.dim() - 1), 0, total - len(flat)))[None]
