"""The one rule for arguments and results: a batch is split over data-parallel ranks, results are merged by type."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from hone.data.packing import balanced_parts, restore
from hone.types import Batch, Metric, Metrics, ModelOutput, Reducer, merge_metrics

_TENSORS, _METRICS = b"T", b"M"
_FIELDS = ("logprobs", "entropy", "values")


def split_groups(batch: Batch, parts: int) -> list[list[int]]:
    """`parts` lists of sequences, near equal in tokens; a group (`batch.group_index`) is never divided.

    With fewer groups than parts, some lists are empty.
    """
    members: dict[int, list[int]] = {}
    for sequence, group in enumerate(batch.group_index.tolist()):
        members.setdefault(group, []).append(sequence)
    groups = list(members.values())
    if len(groups) <= parts:
        return [*groups, *([] for _ in range(parts - len(groups)))]
    lengths = batch.lengths
    sizes = torch.stack([lengths[group].sum() for group in groups])
    of_groups = batch.with_(cu_seqlens=torch.nn.functional.pad(sizes.cumsum(0), (1, 0)))
    return [sorted(i for group in part for i in groups[group]) for part in balanced_parts(of_groups, parts)]


def encode(result: Any) -> bytes | None:
    """A result that ranks have to merge, as bytes; None for one that they do not (it is the same on all of them)."""
    if isinstance(result, ModelOutput):
        return _TENSORS + save({name: one.detach().cpu().contiguous() for name, one in tensors_of(result).items()})
    if isinstance(result, dict) and all(isinstance(value, Metric) for value in result.values()):
        return _METRICS + json.dumps({n: [m.total, m.count, m.reducer.value] for n, m in result.items()}).encode()
    return None


def merge(results: Sequence[bytes], parts: Sequence[Sequence[int]] | None, batch: Batch | None) -> Any:
    """One result from those of the data-parallel ranks, in their order; `parts` says who had which sequences."""
    if results[0][:1] == _METRICS:
        return merge_metrics(*(_metrics(one) for one in results))
    return merge_tensors([load(one[1:]) for one in results], parts, batch)


def tensors_of(output: ModelOutput) -> dict[str, Tensor]:
    """The tensors that an output has, by name; those of `extras` as `extras.NAME`."""
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
    plain = ModelOutput(**{name: tensors[name] for name in _FIELDS if name in tensors})
    extras = {name.removeprefix("extras."): value for name, value in tensors.items() if name.startswith("extras.")}
    return replace(plain, extras=extras)
