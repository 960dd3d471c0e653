"""An engine's state on disk: safetensors for tensors, JSON for numbers, so that loading runs no code.

    model-<rank>-of-<ranks>.safetensors      the parts of each weight that a rank holds, in master precision; buffers
    optimizer-<rank>-of-<ranks>.safetensors  "<weight>/<state>" tensors, such as "model.norm.weight/exp_avg"
    engine.json                              format, number of ranks, optimizer, its plain numbers, schedule's step

Each file says in its header which box of which whole tensor each entry is, so any number of ranks, sharded in any way,
loads what any other number has saved, and reads only what it holds. Restoring is exact to the bit and strict: a
missing, unknown or misshapen tensor is an error that names it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer

from hone.engines.shards import Part, Piece, Shard

FORMAT = 2
MODEL, OPTIMIZER, ENGINE_FILE = "model", "optimizer", "engine.json"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file and what is wrong with it."""


def part_file(kind: str, rank: int, ranks: int) -> str:
    return f"{kind}-{rank:05d}-of-{ranks:05d}.safetensors"


def snapshot(path: Path, parts: Iterable[Part]) -> Callable[[], None]:
    """Copy what this rank is the owner of, now; what is returned writes the copies to `path`, at any time."""
    tensors: dict[str, Tensor] = {}
    boxes: dict[str, dict[str, Any]] = {}
    for name, local, shard in parts:
        for piece in shard.pieces() if shard.is_owner else ():
            key = name if piece.shape == shard.shape else f"{name}@{','.join(map(str, piece.offset))}"
            tensors[key] = local.detach()[piece.at].to("cpu", copy=True).contiguous()
            boxes[key] = {"name": name, "whole": list(shard.shape), "offset": list(piece.offset)}
    return partial(save_file, tensors, path, metadata={"boxes": json.dumps(boxes)})


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


@dataclass(frozen=True, slots=True)
class _Box:
    """One entry of a file: which part of a whole tensor it is."""

    path: Path
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class PartsReader:
    """The whole tensors that the files of several ranks make up, read box by box."""

    def __init__(self, folder: Path, kind: str, ranks: int) -> None:
        """Raises CheckpointError if a file is missing or damaged."""
        self.where = folder / f"{kind}-*.safetensors"
        self._files: dict[Path, Any] = {}
        self._boxes: dict[str, list[_Box]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for rank in range(ranks):
            path = folder / part_file(kind, rank, ranks)
            if not path.is_file():
                raise CheckpointError(f"{path} is missing")
            try:
                self._open(path)
            except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{path} is truncated or damaged: {error}") from error

    def _open(self, path: Path) -> None:
        file: Any = safe_open(path, framework="pt")
        self._files[path] = file
        for key, one in json.loads(file.metadata()["boxes"]).items():
            self.shapes[one["name"]] = tuple(one["whole"])
            box = _Box(path, key, tuple(one["offset"]), tuple(file.get_slice(key).get_shape()))
            self._boxes.setdefault(one["name"], []).append(box)

    def read(self, name: str, shard: Shard) -> Tensor:
        """This rank's part of a tensor, on the CPU. Raises CheckpointError if the files do not hold all of it."""
        boxes = self._boxes[name]
        if shard.shape != self.shapes[name]:
            raise CheckpointError(
                f"{self.where}: {name} is {list(self.shapes[name])}, this run has {list(shard.shape)}"
            )
        first = self._files[boxes[0].path]
        if not shard.shape:
            return first.get_tensor(boxes[0].key)  # type: ignore[no-any-return]
        local = torch.empty(shard.lengths(len(shard.cuts)), dtype=first.get_slice(boxes[0].key)[:0].dtype)
        for piece in shard.pieces():
            found = sum(self._copy(box, piece, local[piece.at]) for box in boxes)
            if found != piece.numel:
                raise CheckpointError(f"{self.where}: parts of {name} are missing")
        return local

    def _copy(self, box: _Box, piece: Piece, into: Tensor) -> int:
        """Copy what a box and a piece have in common; returns how many elements that is."""
        sides = [
            (max(a, b), min(a + n, b + m))
            for a, n, b, m in zip(box.offset, box.shape, piece.offset, piece.shape, strict=True)
        ]
        if any(start >= stop for start, stop in sides):
            return 0
        theirs = tuple(slice(start - a, stop - a) for (start, stop), a in zip(sides, box.offset, strict=True))
        mine = tuple(slice(start - b, stop - b) for (start, stop), b in zip(sides, piece.offset, strict=True))
        try:
            into[mine] = self._files[box.path].get_slice(box.key)[theirs]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{box.path} is truncated or damaged: {error}") from error
        return math.prod(stop - start for start, stop in sides)


def read_all(reader: PartsReader, into: Iterable[Part]) -> list[tuple[Tensor, Tensor]]:
    """(live tensor, what the checkpoint has for it); nothing is changed yet. Raises CheckpointError on any mismatch."""
    parts = list(into)
    names = {name for name, _, _ in parts}
    missing, strange = sorted(names - set(reader.shapes)), sorted(set(reader.shapes) - names)
    if missing or strange:
        raise CheckpointError(
            f"{reader.where} belong to another model: they lack {missing[:3]} and have {strange[:3]} too many"
        )
    found = [(live, reader.read(name, shard)) for name, live, shard in parts]
    for (name, live, _), (_, stored) in zip(parts, found, strict=True):
        if stored.dtype != live.dtype:
            raise CheckpointError(f"{reader.where}: {name} is {stored.dtype}, this run has {live.dtype}")
    return found


def optimizer_parts(optimizer: Optimizer, weights: Iterable[Part], is_first: bool) -> tuple[list[Part], dict[str, Any]]:
    """The optimizer's state by weight name: tensors, and everything else (numbers, null) for the JSON file.

    `weights` are the masters; state of a master's shape is spread as it is, other tensors (counters) are the same on
    all ranks, and the first one's to write. Raises CheckpointError for state that is neither a tensor nor a number.
    """
    tensors: list[Part] = []
    plain: dict[str, Any] = {}
    for weight_name, weight, shard in weights:
        for key, value in optimizer.state.get(weight, {}).items():
            name = f"{weight_name}/{key}"
            if isinstance(value, Tensor):
                alike = value.dim() > 0 and value.shape == weight.shape
                tensors.append((name, value, shard if alike else Shard(tuple(value.shape), (), 1, is_first)))
            elif value is None or isinstance(value, bool | int | float):
                plain[name] = value
            else:
                raise CheckpointError(f"optimizer state {name} is a {type(value).__name__}, which cannot be saved")
    return tensors, plain


def read_optimizer(
    reader: PartsReader, weights: Iterable[Part], plain: Mapping[str, Any], optimizer: Optimizer
) -> dict[Tensor, dict[str, Any]]:
    """The state for `optimizer.state`. Raises CheckpointError for state of a weight that this run does not have."""
    known = {name: (weight, shard) for name, weight, shard in weights}
    state: dict[Tensor, dict[str, Any]] = {}
    for name in [*reader.shapes, *plain]:
        weight_name, _, key = name.rpartition("/")
        if weight_name not in known:
            raise CheckpointError(f"optimizer state of {weight_name!r}, which this run does not train")
        weight, shard = known[weight_name]
        value = plain.get(name)
        if name in reader.shapes:
            shape = reader.shapes[name]
            value = reader.read(name, shard if shape and shape == shard.shape else Shard(shape, (), 1, False))
            # counters stay where the optimizer made them, per-weight state with its weight
            value = value.to(weight.device) if value.dim() or _fused(optimizer) else value
        state.setdefault(weight, {})[key] = value
    return state


def _fused(optimizer: Optimizer) -> bool:
    return any(group.get("fused") for group in optimizer.param_groups)
