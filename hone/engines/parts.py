"""Part of each tensor that a rank holds. Checkpoints and adapters read it to work with every backend.

A tensor in one process is one piece. A backend that cuts weights over ranks describes its cut as a `Shard`: the boxes
of the whole tensor that lie in the rank's local one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from hone.models.parts.boxes import BoxMap


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a whole tensor, and where it lies in this rank's local tensor."""

    offset: tuple[int, ...]  # in the whole tensor
    shape: tuple[int, ...]
    at: tuple[slice, ...]  # in the local tensor

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Shard(Protocol):
    """Distribution of one tensor over the ranks, as one rank sees it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""

    @property
    def is_owner(self) -> bool:
        """Return whether this rank is the first of those that hold the same part, and writes it."""

    def pieces(self) -> list[Piece]:
        """The boxes of the whole tensor that this rank holds."""

    def local_shape(self) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor that this rank holds all of."""

    shape: tuple[int, ...]
    is_owner: bool = True

    def pieces(self) -> list[Piece]:
        at = tuple(slice(0, length) for length in self.shape)
        return [] if 0 in self.shape else [Piece((0,) * len(self.shape), self.shape, at)]

    def local_shape(self) -> list[int]:
        return list(self.shape)


Part = tuple[str, Tensor, Shard]
"""A name, the live tensor that this rank holds, and which part of the whole tensor that is."""

GatherFn = Callable[[str, Tensor], Tensor]
"""A weight's name and this rank's part of it -> the whole weight. Every rank calls it."""

CastFn = Callable[[str, Tensor], Tensor]
"""A weight's name, and the weight or a part of it -> the same values in the precision in which they are wanted."""

PlaceFn = Callable[[Any, Tensor, bool], nn.Parameter]
"""An empty parameter, a whole tensor, whether it is trained -> a parameter with this rank's part of the tensor."""


class Weights(Protocol):
    """The weights of one engine's model, by name, tied ones once; a backend has its own implementation."""

    masters: dict[str, Tensor]
    """What the optimizer updates, in `model.dtype`: this rank's parts of the trained weights."""

    def collect(self) -> None:
        """Add a backward's gradients to the masters'; called once after each micro-batch."""

    def settle(self) -> None:
        """Complete gradients that are sums over ranks; called once before each optimizer step."""

    def gradient_norm(self) -> float:
        """The 2-norm of all gradients of all ranks; a part that several ranks hold counts once."""

    def publish(self, names: frozenset[str] | None = None) -> None:
        """Copy the masters (only `names`, if given) into the forward's weights; called after each change."""

    def clear_gradients(self) -> None: ...

    def parts(self) -> Iterable[Part]:
        """Every weight (live), in the highest precision there is; as several parts if its boxes are apart here."""

    def trained(self) -> Iterable[Part]:
        """The parts of the masters."""

    def whole(self, cast: CastFn | None = None) -> Iterator[tuple[str, Tensor]]:
        """Every entry of the model's state dict, whole, tied ones under each name; each tensor owns its storage.

        Gathered as they are taken: every rank takes all of them. `cast` is applied before weights are gathered, so a
        narrower dtype halves what the ranks exchange.
        """

    def chosen(self, names: frozenset[str]) -> dict[str, Tensor]:
        """Gather some of `parts`. Every rank calls it."""


@runtime_checkable
class PartlyGathered(Protocol):
    """Weights of which each rank can get only a box."""

    def layout(self) -> Mapping[str, Tensor]:
        """Every entry of `Weights.whole`, whole, on the meta device."""

    def needed(self, needs: Sequence[BoxMap]) -> AbstractContextManager[None]:
        """In this context, `Weights.whole` yields views (`hone.models.parts.views`) that have only the box that this
        rank needs. `needs` are of every rank, and name every entry of `layout`."""


def blend_parts(parts: Sequence[Part], tensors: Mapping[str, Tensor], mixup: float) -> None:
    """Set each part to mixup * its whole tensor + (1 - mixup) * itself. Raises ValueError for another shape."""
    for name, _, shard in parts:
        if shard.shape != tuple(tensors[name].shape):
            raise ValueError(
                f"{name} is {list(shard.shape)}, what is to be blended into it is {list(tensors[name].shape)}"
            )
    for name, live, shard in parts:
        _blend(live, shard, tensors[name], mixup)


def _blend(live: Tensor, shard: Shard, whole: Tensor, mixup: float) -> None:
    """Blend the local part of a weight; numbers that are counts are copied."""
    for piece in shard.pieces():
        there = tuple(slice(start, start + length) for start, length in zip(piece.offset, piece.shape, strict=True))
        own, new = live[piece.at], whole[there].to(live.device, live.dtype)
        if own.is_floating_point():
            own.lerp_(new, mixup)
        else:
            own.copy_(new)


__all__ = [
    "CastFn",
    "GatherFn",
    "Part",
    "PartlyGathered",
    "Piece",
    "PlaceFn",
    "Shard",
    "Weights",
    "Whole",
    "blend_parts",
]
