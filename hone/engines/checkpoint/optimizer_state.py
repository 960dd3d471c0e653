"""An optimizer's state by weight name, so that it can be cut like the weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hone.engines.checkpoint.eight_bit import CODEBOOK, has_blocks, part_name, recut
from hone.engines.checkpoint.files import CheckpointError, PartsReader
from hone.engines.optimizers import quantises
from hone.engines.parts import Part, Shard, Whole


def optimizer_parts(optimizer: Optimizer, weights: Iterable[Part]) -> tuple[list[Part], dict[str, Any]]:
    """The optimizer's state by weight name: tensors, and everything else (numbers, null) for the JSON file.

    `weights` are the masters. State with the shape of its master is sharded like it. Other tensors (counters) are equal
    in all parts of a weight; the rank with the weight's first element writes them. Codes and scales of an 8-bit
    optimizer belong to a part, which their name gives: "<weight>/absmax1@16,0+16,32" is of the box of shape 16 x 32 at
    row 16. Raises CheckpointError for state that is no tensor and no number.
    """
    tensors: list[Part] = []
    plain: dict[str, Any] = {}
    blockwise = quantises(optimizer)
    for weight_name, weight, shard in weights:
        part = part_name(shard) if blockwise else ""
        for key, value in optimizer.state.get(weight, {}).items():
            name = f"{weight_name}/{key}"
            if isinstance(value, Tensor) and part and not key.startswith(CODEBOOK):
                tensors.append((f"{name}@{part}", value, Whole(tuple(value.shape), shard.is_owner)))
            elif isinstance(value, Tensor):
                alike = value.dim() > 0 and value.shape == weight.shape
                tensors.append((name, value, shard if alike else Whole(tuple(value.shape), _has_first_element(shard))))
            elif value is None or isinstance(value, bool | int | float):
                plain[name] = value
            else:
                raise CheckpointError(f"optimizer state {name} is a {type(value).__name__}, which cannot be saved")
    return tensors, plain


def _has_first_element(shard: Shard) -> bool:
    return shard.is_owner and any(not any(piece.offset) for piece in shard.pieces())


def read_optimizer(
    reader: PartsReader, weights: Iterable[Part], plain: Mapping[str, Any], optimizer: Optimizer
) -> dict[Tensor, dict[str, Any]]:
    """The state for `optimizer.state`. Raises CheckpointError for state of a weight that this run does not have."""
    parts = list(weights)
    blockwise = quantises(optimizer)
    stored: dict[str, list[str]] = {name: [] for name, _, _ in parts}  # weight -> names of its state
    for name in [*reader.shapes, *plain]:
        weight_name = name.rpartition("/")[0]
        if weight_name not in stored:
            raise CheckpointError(
                f"the checkpoint has optimizer state of {weight_name!r}, which this run does not train; use "
                "the settings of the run that saved it (lora, modules_to_save), or another run.dir"
            )
        stored[weight_name].append(name)
    state: dict[Tensor, dict[str, Any]] = {}
    for weight_name, weight, shard in parts:
        own = part_name(shard) if blockwise else ""
        names = stored[weight_name] if weight.numel() or not blockwise else []
        tensors = [name for name in names if name in reader.shapes]
        if blockwise and not has_blocks(tensors, own):
            moments = recut(reader, tensors, shard, optimizer)
            state[weight] = {key: value.to(weight.device) for key, value in moments.items()}
            names = [name for name in names if name not in reader.shapes]
        for name in names:
            key, _, part = name.rpartition("/")[2].partition("@")
            if part not in ("", own):
                continue
            value = plain.get(name)
            if name in reader.shapes:
                shape = reader.shapes[name]
                value = reader.read(name, shard if shape and shape == shard.shape else Whole(shape, False))
                # counters stay where the optimizer made them, per-weight state with its weight
                value = value.to(weight.device) if value.dim() or _fused(optimizer) else value
            state.setdefault(weight, {})[key] = value
    return state


def _fused(optimizer: Optimizer) -> bool:
    return any(group.get("fused") for group in optimizer.param_groups)
