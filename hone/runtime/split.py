"""Splits a batch over data-parallel ranks, and merges their results by type.

`encode` and `merge` are for ranks under torchrun, which exchange results as bytes in a collective. Under Ray results
come as arrays through the object store (`batch_plan.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from hone.data.packing import balanced, groups_of, restore, sequence_costs
from hone.types import Batch, Metric, Metrics, ModelOutput, Reducer, merge_metrics

_TENSORS, _METRICS = b"T", b"M"
_FIELDS = ("logprobs", "entropy", "values")


SLACK = 1.05  # how much busier than after a cut by sequences the busiest rank may be, to keep groups together


def split_batch(
    batch: Batch, parts: int, whole_groups: bool = False, equal_cost_length: float | None = None
) -> list[list[int]]:
    """`parts` lists of sequences of near-equal cost; `equal_cost_length` is explained in `hone.data.packing`.

    The answers to one prompt share its tokens when they are in one micro-batch, so groups (`batch.group_index`) stay
    together as long as no rank gets more than `SLACK` of what a cut by sequences would give the busiest. Otherwise
    each group is halved, again and again. With `whole_groups`, for losses that compare the members of a group, groups
    are never divided. Some lists are empty if there are fewer pieces than parts.
    """
    costs = sequence_costs(batch, equal_cost_length)
    pieces = groups_of(batch)
    most = SLACK * _busiest(balanced(costs, parts), costs)
    while True:
        dealt = balanced([sum(costs[i] for i in piece) for piece in pieces], parts)
        found = [sorted(i for number in part for i in pieces[number]) for part in dealt]
        if whole_groups or _busiest(found, costs) <= most or len(pieces) == batch.num_sequences:
            return found
        middles = [(len(piece) + 1) // 2 for piece in pieces]
        halves = [part for at, piece in zip(middles, pieces, strict=True) for part in (piece[:at], piece[at:])]
        pieces = [half for half in halves if half]


def whole_groups_for(arguments: Sequence[Any]) -> bool:
    """Return whether a call has a loss among its arguments that compares the members of a group."""
    return any(getattr(one, "whole_groups", False) for one in arguments)


def _busiest(parts: Sequence[Sequence[int]], costs: Sequence[float]) -> float:
    return max(sum(costs[i] for i in part) for part in parts)


def encode(result: Any) -> bytes | None:
    """Encode a result that the ranks merge; None for a result that is the same on all ranks."""
    if isinstance(result, ModelOutput):
        return _TENSORS + save({name: one.detach().cpu().contiguous() for name, one in tensors_of(result).items()})
    if isinstance(result, dict) and all(isinstance(value, Metric) for value in result.values()):
        return _METRICS + json.dumps({n: [m.total, m.count, m.reducer.value] for n, m in result.items()}).encode()
    return None


def merge(results: Sequence[bytes], parts: Sequence[Sequence[int]] | None, batch: Batch | None) -> Any:
    """Merge the results of the data-parallel ranks, in rank order; `parts` has each rank's sequences."""
    if results[0][:1] == _METRICS:
        return merge_metrics(*(_metrics(one) for one in results))
    return merge_tensors([load(one[1:]) for one in results], parts, batch)


def tensors_of(output: ModelOutput) -> dict[str, Tensor]:
    """The tensors that an output has, by name; tensors in `extras` are called `extras.NAME`."""
    found = {name: value for name in _FIELDS if (value := getattr(output, name)) is not None}
    return found | {f"extras.{name}": value for name, value in output.extras.items()}


def merge_tensors(
    decoded: Sequence[dict[str, Tensor]], parts: Sequence[Sequence[int]] | None, batch: Batch | None
) -> ModelOutput:
    """One output from the tensors of the data-parallel ranks (`tensors_of`), in the order of the batch."""
    if parts is None or batch is None:
        return _output(decoded[0])
    having = [(tensors, part) for tensors, part in zip(decoded, parts, strict=True) if part]
    order = [part for _, part in having]
    return _output({name: restore([one[name] for one, _ in having], order, batch.cu_seqlens) for name in having[0][0]})


def _metrics(encoded: bytes) -> Metrics:
    return {name: Metric(t, c, Reducer(r)) for name, (t, c, r) in json.loads(encoded[1:]).items()}


def _output(tensors: dict[str, Tensor]) -> ModelOutput:
    extras = {name.removeprefix("extras."): value for name, value in tensors.items() if name.startswith("extras.")}
    return ModelOutput(tensors.get("logprobs"), tensors.get("entropy"), tensors.get("values"), extras)
