"""Boxes of weights that ranks need before a conversion, from those that are needed after it.

    model       experts.gate_up_proj [8, 96, 32]  <-- experts 2..3, rows 0..23
    conversion  (`checkpoint_names`: one tensor per expert and matrix, as in the files)
    receiver    experts.2.gate_proj.weight [48, 32] rows 0..23, experts.3.gate_proj.weight ...

The conversion runs once on views of tensors without values, so its own code says where each result comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from hone.models.parts.boxes import Box, Boxed, BoxMap, hull, is_empty, narrowed, nothing
from hone.models.parts.views import Reads, Viewed, viewed

Named = Iterable[tuple[str, Tensor]]


def boxes_before(
    layout: Mapping[str, Tensor], convert: Callable[[Named], Named], needs: Sequence[BoxMap | None]
) -> list[BoxMap]:
    """Return the boxes of `layout` (on the meta device) from which `convert` yields those in `needs`, by rank.

    `needs` are of each rank; a tensor that is not in its map is needed whole, and a rank with None needs nothing.
    What `convert` reads to compute with it is needed by every rank.
    """
    reads = Reads()
    made = dict(convert((name, viewed(name, one, reads)) for name, one in layout.items()))
    found: list[BoxMap] = []
    for need in needs:
        boxes = {name: reads.boxes.get(name, nothing(one.shape)) for name, one in layout.items()}
        for name, view in made.items():
            if need is not None and isinstance(view, Viewed):
                boxes[view.weight] = hull(boxes[view.weight], _source(view, need.get(name)))
        found.append({name: Boxed(tuple(layout[name].shape), box) for name, box in boxes.items()})
    return found


def _source(view: Viewed, needed: Boxed | None) -> Box:
    """The box of the weight that a box of a view shows."""
    if needed is None or needed.shape != tuple(view.shape):
        return view.window.box()
    if is_empty(needed.box):
        return nothing(view.boxed.shape)
    part = narrowed(view, needed.box)
    assert isinstance(part, Viewed)
    return part.window.box()


__all__ = ["boxes_before"]
