"""An engine's state on disk: safetensors for tensors, JSON for numbers, so that loading runs no code.

    model.safetensors      weights in master precision, and the model's persistent buffers
    optimizer.safetensors  "<weight>/<state>" tensors, such as "model.norm.weight/exp_avg"
    engine.json            format, optimizer name, the state's plain numbers, the schedule's step

Restoring is exact to the bit and strict: a missing, unknown or misshapen tensor is an error that names it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer

FORMAT = 1
MODEL_FILE, OPTIMIZER_FILE, ENGINE_FILE = "model.safetensors", "optimizer.safetensors", "engine.json"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file and what is wrong with it."""


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors, each with storage of its own."""
    save_file({name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}, path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Raises CheckpointError if the file is missing or damaged."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is truncated or damaged: {error}") from error


def load_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is truncated or damaged: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise CheckpointError(f"{path} should have format {FORMAT}")
    return found


@torch.no_grad()
def fill(path: Path, into: Mapping[str, Tensor]) -> None:
    """Copy the tensors of a file into live tensors of the same names. Raises CheckpointError if they do not match."""
    found = load_tensors(path)
    missing, strange = sorted(set(into) - set(found)), sorted(set(found) - set(into))
    if missing or strange:
        raise CheckpointError(f"{path} belongs to another model: it lacks {missing[:3]} and has {strange[:3]} too many")
    for name, tensor in into.items():
        stored = found[name]
        if stored.shape != tensor.shape or stored.dtype != tensor.dtype:
            raise CheckpointError(
                f"{path}: {name} is {stored.dtype} {list(stored.shape)}, "
                f"this run has {tensor.dtype} {list(tensor.shape)}"
            )
    for name, tensor in into.items():
        tensor.copy_(found[name])


def optimizer_state(optimizer: Optimizer, names: Mapping[Tensor, str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's state by weight name: tensors, and everything else (numbers, null) for the JSON file.

    Raises CheckpointError for state that is neither, which could not be restored.
    """
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for weight, state in optimizer.state.items():
        for key, value in state.items():
            name = f"{names[weight]}/{key}"
            if isinstance(value, Tensor):
                tensors[name] = value
            elif value is None or isinstance(value, bool | int | float):
                plain[name] = value
            else:
                raise CheckpointError(f"optimizer state {name} is a {type(value).__name__}, which cannot be saved")
    return tensors, plain


def restore_optimizer(
    optimizer: Optimizer, weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor], plain: Mapping[str, Any]
) -> None:
    """Replace the optimizer's state. Raises CheckpointError for state of a weight that this run does not have."""
    state: dict[Tensor, dict[str, Any]] = {}
    for name, value in [*tensors.items(), *plain.items()]:
        weight_name, _, key = name.rpartition("/")
        if weight_name not in weights:
            raise CheckpointError(f"{OPTIMIZER_FILE}: state of {weight_name!r}, which this run does not train")
        weight = weights[weight_name]
        if isinstance(value, Tensor):  # counters stay where the optimizer made them, per-weight state with its weight
            value = value.to(weight.device) if value.dim() or _fused(optimizer) else value
        state.setdefault(weight, {})[key] = value
    optimizer.state.clear()
    optimizer.state.update(state)


def _fused(optimizer: Optimizer) -> bool:
    return any(group.get("fused") for group in optimizer.param_groups)
