"""Changes to a loaded model, in place, so that its attention sees positions and sequences of a packed row."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hone.models.attention.indexed import ChooseFn, Queries, choose_by_sequence, choose_in_row
from hone.models.attention.packed import current_packing
from hone.models.attention.temperature import keep_positions
from hone.models.transformers_patches import name_body


def choose_in_current_row(queries: Queries) -> list[Tensor]:
    """The keys that the tokens of the current forward see, by an indexer (`indexed.ChooseFn`)."""
    packing = current_packing()
    if packing is None:
        raise RuntimeError("an indexer has to be called inside `with packed(cu_seqlens):`")
    if packing.ranks is not None:
        raise NotImplementedError("sparse attention is not computed by several sequence-parallel ranks")
    return choose_in_row(queries, packing)


def adapt(model: Any, choose: ChooseFn = choose_in_current_row) -> None:
    """Adapt a model with or without its head; a model that needs no change stays as it is."""
    name_body(model)
    keep_positions(model)
    choose_by_sequence(model, choose)
