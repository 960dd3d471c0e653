"""States of convolutions and recurrent layers in the built-in engine: a row for each running sequence.

    prefill    prompts of one length --layer--> outputs, and the state after each prompt's last token --> its row
    decode     rows --layer, one token each--> outputs; the rows then hold the new states

A layer writes its state by transformers' calls for caches (`hone.models.attention.stateful`), so `Rows` stands in for
a cache. A state cannot be cut back to fewer tokens. So only requests that begin together share a prefill of their
prompt, and between the turns of an episode the states at the end of the prompt's last whole block are kept with its KV.
Nothing is kept where a layer cannot go on from a state with several tokens (Mamba 1).
"""

from __future__ import annotations

import inspect
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.data.routes import Routes
from hone.models.attention.chunks import pieces
from hone.models.attention.stateful import (
    Carried,
    cache_argument,
    each_tensor,
    goes_on,
    own_forward,
    separate,
    state_layers,
)
from hone.models.transformers_patches import limit_single_steps, step_limit
from hone.rollout.builtin.cache import MINIMUM_ROWS, CacheLimits, CacheShapes, KVCache, PackedPrompts, Step
from hone.rollout.builtin.prefixes import BLOCK, Block, Prefixes, Root, joined

RunFn = Callable[["Rows", Callable[[Tensor], Tensor]], Any]
"""Runs a layer over rows; the function changes each tensor of its arguments."""


class Rows(Carried):
    """The states of some rows of one layer, which decoding changes in place."""

    def __init__(self, conv: Tensor | None = None, recurrent: Tensor | None = None) -> None:
        """States after the tokens so far; None: the rows begin."""
        super().__init__({0: conv}, {0: recurrent})

    @property
    def kept(self) -> tuple[Tensor | None, Tensor | None]:
        """The states after the last token, [n, ...] each."""
        return self.conv_states[0], self.recurrent_states[0]

    def _set(self, states: dict[int, Tensor | None], index: int, new: Tensor) -> None:
        before = states[index]
        if before is None:
            states[index] = new.clone()
        else:
            before.copy_(new)


States = Mapping[str, tuple[Tensor | None, Tensor | None]]  # by layer: of convolutions, and recurrent


def bytes_of(states: States) -> int:
    return sum(one.nbytes for pair in states.values() for one in pair if one is not None)


class StatePrefixes(Prefixes):
    """Kept blocks, and the states behind some of them.

    States are larger than a block. So those behind the last block of a prompt are kept, for `prompts` prompts at most.
    """

    def __init__(self, most_tokens: int, prompts: int) -> None:
        super().__init__(most_tokens)
        self._prompts = prompts
        self._ends: OrderedDict[int, States] = OrderedDict()  # by number of the block; the longest unused first

    @property
    def bytes(self) -> int:
        return super().bytes + sum(map(bytes_of, self._ends.values()))

    def clear(self) -> None:
        super().clear()
        self._ends.clear()

    def find_end(self, root: Root, tokens: tuple[int, ...]) -> tuple[list[Block], States]:
        """Find the blocks that `tokens` begins with, up to one behind which states are kept; return these, too."""
        found = self.find(root, tokens)
        while found and found[-1].number not in self._ends:
            found.pop()
        if not found:
            return [], {}
        self._ends.move_to_end(found[-1].number)
        return found, self._ends[found[-1].number]

    def keep_end(self, root: Root, tokens: tuple[int, ...], states: States) -> None:
        """Keep the states behind the last whole block of `tokens`, if that is kept."""
        found = self.find(root, tokens)
        if found and len(found) == len(tokens) // BLOCK:
            self._ends[found[-1].number] = states
            self._ends.move_to_end(found[-1].number)
        while len(self._ends) > self._prompts:
            self._ends.popitem(last=False)


@dataclass(slots=True)
class Edge:
    """States of a row behind the last whole block of its prompt: [1, ...] each."""

    tokens: int
    states: dict[str, tuple[Tensor | None, Tensor | None]] = field(default_factory=dict)  # by layer


class StateCache(KVCache):
    """A KV cache with the states of the rows. Memory of a layer's states is taken when it first writes one."""

    copies_running = False  # a running row's state is beyond the prompt that it would share

    def __init__(self, shapes: CacheShapes, limits: CacheLimits, dtype: torch.dtype, device: torch.device) -> None:
        self._states: dict[str, tuple[Tensor | None, Tensor | None]] = {}  # layer -> convolution, recurrent [rows, ...]
        self._edges: dict[int, Edge] = {}  # by row, of prompts that later turns continue
        super().__init__(shapes, limits, dtype, device)
        self.prefixes: StatePrefixes = StatePrefixes(limits.kept_tokens, limits.rows)

    @property
    def bytes(self) -> int:
        edges = {id(edge): bytes_of(edge.states) for edge in self._edges.values()}  # rows of one prompt share theirs
        return super().bytes + sum(one.nbytes for one in self._tensors()) + sum(edges.values())

    def _tensors(self) -> list[Tensor]:
        return [one for pair in self._states.values() for one in pair if one is not None]

    def release(self) -> None:
        self._states.clear()
        self._edges.clear()
        super().release()

    def recall(self, root: Root, tokens: tuple[int, ...], row: int) -> tuple[int, Routes | None]:
        self._edges.pop(row, None)  # of the request that had the row before
        blocks, states = self.prefixes.find_end(root, tokens)
        if not blocks:
            return 0, None
        kept, routes = joined(blocks)
        count = len(blocks) * BLOCK
        for stored, one in zip((*self.keys, *self.values), kept, strict=True):
            stored[:, row, :, :count] = one
        for name, pair in states.items():
            self.write_states(name, torch.tensor([row], device=self.device), pair)
        self._edges[row] = Edge(count, dict(states))
        return count, routes

    def keep(self, root: Root, tokens: tuple[int, ...], row: int, routes: Routes | None) -> None:
        edge = self._edges.get(row)
        if (
            edge is not None
            and edge.tokens == len(tokens) // BLOCK * BLOCK
            and edge.states.keys() == self._states.keys()
        ):
            super().keep(root, tokens, row, routes)
            self.prefixes.keep_end(root, tokens, edge.states)

    def note_edge(self, name: str, rows: Tensor, tokens: int, states: tuple[Tensor | None, Tensor | None]) -> None:
        """Note a layer's states [n, ...] of some rows behind so many tokens, where a block ends."""
        for index, row in enumerate(rows.tolist()):
            if row not in self._edges or self._edges[row].tokens != tokens:
                self._edges[row] = Edge(tokens)
            conv, recurrent = (None if one is None else one[index : index + 1].clone() for one in states)
            self._edges[row].states[name] = conv, recurrent

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
        for target in targets.tolist():
            self._move_edge(source, target)

    def move_row(self, source: int, target: int, columns: int) -> None:
        super().move_row(source, target, columns)
        for one in self._tensors():
            one[target] = one[source]
        self._move_edge(source, target)

    def _move_edge(self, source: int, target: int) -> None:
        """Give a row the edge of another, which keeps it until it is prefilled again."""
        self._edges.pop(target, None)
        if source in self._edges:
            self._edges[target] = self._edges[source]

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

    def states_at(self, name: str, rows: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Copies of a layer's states of some rows."""
        conv, recurrent = (None if one is None else one[rows] for one in self._states[name])
        return conv, recurrent


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
        cls: Any = type(layer)
        this = _Layer(name, parameters, cache_argument(cls), goes_on(cls))
        layer.forward = types.MethodType(_forward_of(this, current), layer)
    return tuple(layers)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Facts about a layer with a state."""

    name: str
    parameters: tuple[str, ...]  # of its forward
    cache: str  # the one of these that takes a cache
    goes_on: bool


def _forward_of(layer: _Layer, current: Callable[[], Work | None]) -> Callable[..., Any]:
    parameters = layer.parameters

    def forward(self: nn.Module, *args: Any, **asked: Any) -> Any:
        work = current()
        if work is None:
            return separate(self, *args, **asked)
        given = dict(zip(parameters, args, strict=False)) | asked

        def run(rows: Rows, change: Callable[[Tensor], Tensor]) -> Any:
            with step_limit(getattr(self, "time_step_limit", None)):
                return own_forward(self, **(each_tensor(given, change) | {layer.cache: rows}))

        if work.step is not None:
            return _decode(run, work.cache, layer.name, work.step)
        assert work.prompts is not None
        return _prefill(run, work.cache, layer, work.prompts)

    return forward


def _prefill(run: RunFn, cache: StateCache, layer: _Layer, prompts: PackedPrompts) -> Any:
    """Run the prompts of each length together, and keep the states after their last tokens.

    Prompts whose KV is kept go block by block, as `KVCache.attend_prompts` does, whatever was kept.
    """
    total = len(prompts.token_ids)
    results = []
    start = 0
    for part in prompts.runs:
        shape = (len(part.rows), part.length)
        end = start + part.length * len(part.rows)
        kept = part.in_blocks and layer.goes_on
        edge = (part.start + part.length) // BLOCK * BLOCK
        rows = Rows(*cache.states_at(layer.name, part.rows)) if part.start else Rows()
        found = []
        for begin, stop in pieces(part.start, part.length, BLOCK if kept else part.length, None):

            def of_piece(
                tensor: Tensor, first: int = start, last: int = end, cut: slice = slice(begin, stop), shape: Any = shape
            ) -> Tensor:
                return tensor[0, first:last].unflatten(0, shape)[:, cut] if tensor.shape[:2] == (1, total) else tensor

            found.append((run(rows, of_piece), (shape[0], stop - begin)))
            rows = Rows(*rows.kept)
            if kept and part.start + stop == edge:
                cache.note_edge(layer.name, part.rows, edge, rows.kept)
        results.append((_side_by_side(found), shape))
        cache.write_states(layer.name, part.rows, rows.kept)
        start = end
    return _row(results, total)


def _side_by_side(parts: list[tuple[Any, tuple[int, int]]]) -> Any:
    """Join the results for the pieces of some prompts to [n, L, ...]; None if they are no tensors over tokens."""
    first, shape = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, tuple):
        return tuple(_side_by_side([(one[i], size) for one, size in parts]) for i in range(len(first)))
    if not isinstance(first, Tensor) or first.shape[:2] != shape:
        return None
    return torch.cat([one for one, _ in parts], 1)


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
