"""Boxes of the weights that a process needs, learned from its own loader.

    first sync    whole tensors --> `watched` --> the loader; `Reads` records which box of each tensor it read
    later syncs   these boxes   --> `watched` --> the same loader, which sees tensors of the whole shape

So hone has no table of how an engine such as vLLM divides a model, whatever its parallelism. A rank of tensor parallel
2 reads half of most tensors; a rank of expert or pipeline parallel reads some tensors, and nothing of others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hone.models.parts.boxes import to_text
from hone.models.parts.views import Reads, viewed
from hone.weights.base import NamedTensor
from hone.weights.delivery import Delivery, receive


class Wants:
    """The boxes that the loader of this process read in the last sync; nothing is known of a new process."""

    def __init__(self) -> None:
        self.text = ""  # a map of boxes; empty: whole tensors

    def forget(self) -> None:
        """Get whole tensors in the next sync."""
        self.text = ""

    @contextmanager
    def learning(self, offer: Mapping[str, Any], rank: int, token: str) -> Iterator[tuple[Delivery, Reads]]:
        """Receive weights as `rank` of a replica (see `receive`). If the block fails, the next sync brings all."""
        text, self.text = self.text, ""
        reads = Reads()
        with receive(offer, rank, token, wants=text) as delivery:
            yield delivery, reads
        self.text = to_text(reads.map()) if reads.shapes else text  # an adapter is read without `watched`


def watched(delivery: Delivery, reads: Reads) -> Iterator[NamedTensor]:
    """Wrap the tensors of a delivery for a loader; `reads` records what the loader uses of them."""
    for name, tensor in delivery:
        yield name, viewed(name, tensor, reads, delivery.boxes.get(name))


__all__ = ["Wants", "watched"]
