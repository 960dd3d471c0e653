"""Layers that carry a state from token to token see one sequence of a packed row at a time.

    row [1, T, H] --gather--> [n, L, H]: sequences of like length, right-padded --layer--> --gather--> row [1, T, H]

Convolutions, state-space layers (Mamba) and linear attention (gated DeltaNet, KDA, lightning attention) would carry
their state into the next sequence of a row. They are causal, so padding behind a sequence changes nothing in it. A
sequence whose first tokens are shared with others (see `Packing`) gets them in full: the layer computes them once for
each of these sequences, because not every kernel can begin with a state.

hone finds these layers by what they do: they write a convolution or recurrent state into transformers' cache. A check
at start-up proves that no other layer of the model carries one (`hone.engines.checks.isolation`).
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hone.models.attention.packed import Packing, current_packing

_WRITES = frozenset({"update_conv_state", "update_recurrent_state", "set_linear_cache"})  # methods of caches
_PADDED = 1.25  # tokens of a batch with padding, at most, for each without


def state_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Every module that writes a convolution or recurrent state into transformers' cache, by name."""
    kinds = {cls for cls in {type(module) for module in model.modules()} if _writes_state(cls)}
    return {name: module for name, module in model.named_modules() if type(module) in kinds}


def _writes_state(cls: type[nn.Module]) -> bool:
    functions = (one for base in cls.__mro__ for one in vars(base).values() if inspect.isfunction(one))
    return any(not _WRITES.isdisjoint(inspect.unwrap(one).__code__.co_names) for one in functions)


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


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of a packed row, each in full, in batches of like length."""

    batches: tuple[Tensor, ...]  # [n, L] int64 each: tokens of the row; behind its end, a sequence's last token again
    places: Tensor  # [T] int64: where each token of the row is in the batches, end to end

    @classmethod
    def of(cls, packing: Packing) -> Sequences:
        """A prefix that several sequences share is in each of them; its tokens are read from one."""
        ends = np.cumsum(packing.lengths)
        segments = [np.arange(end - length, end) for end, length in zip(ends, packing.lengths, strict=True)]
        prefixes = {parent for parent in packing.parents if parent is not None}
        whole = [
            segment if parent is None else np.concatenate([segments[parent], segment])
            for number, (segment, parent) in enumerate(zip(segments, packing.parents, strict=True))
            if number not in prefixes
        ]
        places = np.empty(packing.num_tokens, np.int64)
        batches: list[Tensor] = []
        start = 0
        device = packing.cu_seqlens.device
        for batch in _alike(whole, packing.num_tokens):
            width = len(batch[0])
            index = np.stack([np.pad(tokens, (0, width - len(tokens)), "edge") for tokens in batch])
            for row, tokens in enumerate(batch):
                places[tokens] = start + row * width + np.arange(len(tokens))
            batches.append(torch.from_numpy(index).to(device))
            start += index.size
        return cls(tuple(batches), torch.from_numpy(places).to(device))


def _alike(sequences: Sequence[NDArray[np.int64]], most: int) -> Iterator[list[NDArray[np.int64]]]:
    """Batches of sequences, longest first, with little padding and at most `most` tokens or one sequence."""
    batch: list[NDArray[np.int64]] = []
    tokens = 0
    for sequence in sorted(sequences, key=len, reverse=True):
        padded = (len(batch) + 1) * len(batch[0]) if batch else 0
        if padded > min(most, _PADDED * (tokens + len(sequence))):
            yield batch
            batch, tokens = [], 0
        batch.append(sequence)
        tokens += len(sequence)
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
    if "sequences" not in packing.layouts:
        packing.layouts["sequences"] = Sequences.of(packing)
    layout: Sequences = packing.layouts["sequences"]
    row = (1, packing.num_tokens)
    results = []
    for batch in layout.batches:

        def laid_out(tensor: Tensor, batch: Tensor = batch) -> Tensor:
            if tensor.shape[:2] != row:
                return tensor
            return tensor[0].index_select(0, batch.flatten()).view(*batch.shape, *tensor.shape[2:])

        results.append(own_forward(layer, *each_tensor(args, laid_out), **each_tensor(asked, laid_out)))
    return _joined(results, layout)


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
    if not isinstance(first, Tensor) or first.shape[:2] != layout.batches[0].shape:
        return None
    flat = [result.flatten(0, 1) for result in results]
    return (flat[0] if len(flat) == 1 else torch.cat(flat)).index_select(0, layout.places)[None]
