"""An engine's state on disk: safetensors for tensors, JSON for numbers, so that loading runs no code.

    model-<rank>-of-<ranks>.safetensors      the parts of each weight that a rank holds, in master precision; buffers
    optimizer-<rank>-of-<ranks>.safetensors  "<weight>/<state>" tensors, such as "model.norm.weight/exp_avg"
    engine.json                              format, number of ranks, dtype, optimizer, its numbers, schedule's step

A model that changes without an optimizer (a reference that follows the policy) has no optimizer files, and null as its
optimizer.

Each file says in its header which box of which whole tensor each entry is, so any number of ranks, sharded in any way,
loads what any other number has saved, and reads only what it holds. Restoring is exact to the bit and strict: a
missing, unknown or misshapen tensor is an error that names it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer

from hone.engines.base import Ranks
from hone.engines.optimizers import Update, quantises
from hone.engines.parts import Part, Piece, Shard, Weights, Whole

if TYPE_CHECKING:
    from hone.engines.lora.adapter import Adapter

FORMAT = 2
MODEL, OPTIMIZER, ENGINE_FILE = "model", "optimizer", "engine.json"
CODEBOOK = "qmap"  # begin of the name of an 8-bit optimizer's state that is the same for all weights
WRITE_S = 3600.0  # longest wait for one file: a disk that takes longer does not answer


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file and what is wrong with it."""


class Checkpoint:
    """Saves and restores one engine: weights, optimizer, schedule, and the identity of adapter and base."""

    def __init__(
        self,
        ranks: Ranks,
        device: str,
        update: Update | None,
        weights: Weights,
        adapter: Adapter | None,
        compute_dtype: str,
    ) -> None:
        """`update` is None for a model that no optimizer changes."""
        self._ranks = ranks
        self._device = device
        self._update = update
        self._weights = weights
        self._adapter = adapter
        self._compute_dtype = compute_dtype
        self._writer = Writer()

    def save(self, folder: Path, model: Iterable[Part]) -> None:
        """Copy the state, and begin to write the copies into an existing folder."""
        rank, ranks = self._ranks.rank, self._ranks.world
        update = self._update
        files = [snapshot(folder / part_file(MODEL, rank, ranks), model)]
        plain: dict[str, Any] = {}
        if update is not None:
            tensors, plain = optimizer_parts(update.optimizer, self._weights.trained())
            files.append(snapshot(folder / part_file(OPTIMIZER, rank, ranks), tensors))
        self._writer.start(files)
        facts = {
            "format": FORMAT,
            "ranks": ranks,
            "compute_dtype": self._compute_dtype,
            "optimizer": self._optimizer_name,
            "optimizer_numbers": plain,
            "schedule_step": 0 if update is None else update.schedule.step_count,
            "adapter": None if self._adapter is None else self._adapter.identity(),
        }
        if rank == 0:
            (folder / ENGINE_FILE).write_text(json.dumps(facts, indent=1), encoding="utf-8")

    def written(self, wait: bool) -> bool:
        """Whether all ranks have written their files; with `wait`, wait until they have. Raises OSError."""
        done = self._writer.done(wait)
        return self._ranks.most(int(not done), self._device) == 0

    def load(self, folder: Path, model: Iterable[Part]) -> None:
        """Restore what `save` wrote into the live tensors of `model`. Raises CheckpointError, with nothing changed."""
        facts = load_json(folder / ENGINE_FILE)
        self._check_adapter(facts.get("adapter"), folder)
        update, mine = self._update, self._optimizer_name
        if facts["optimizer"] != mine:
            theirs = facts["optimizer"] or "no optimizer"
            raise CheckpointError(f"{folder} was written with {theirs}, this run's optimizer is {mine or 'none'}")
        tensors = read_all(PartsReader(folder, MODEL, facts["ranks"]), model)
        state: dict[Tensor, dict[str, Any]] = {}
        if update is not None:
            of_optimizer = PartsReader(folder, OPTIMIZER, facts["ranks"])
            if quantises(update.optimizer):
                self._check_blocks(of_optimizer)
            state = read_optimizer(of_optimizer, self._weights.trained(), facts["optimizer_numbers"], update.optimizer)
        for live, stored in tensors:
            live.copy_(stored)
        self._weights.publish()
        if update is not None:
            update.optimizer.state.clear()
            update.optimizer.state.update(state)
            update.schedule.step_count = facts["schedule_step"]
            update.apply_schedule()

    @property
    def _optimizer_name(self) -> str | None:
        return None if self._update is None else type(self._update.optimizer).__name__

    def _check_blocks(self, reader: PartsReader) -> None:
        """Raise CheckpointError, on every rank, if the quantised state belongs to other parts of the weights."""
        strange = next((name for name, _, shard in self._weights.trained() if not has_blocks(reader, name, shard)), "")
        if self._ranks.most(int(bool(strange)), self._device):
            named = f"{strange} is cut" if strange else "a weight of another rank is cut"
            raise CheckpointError(
                f"{reader.where}: {named} into other parts than in the run that wrote them, and the blocks of "
                f"{self._optimizer_name} belong to parts; continue on as many ranks, with the same backend.parallel, "
                "or begin a new run from an export of this checkpoint"
            )

    def _check_adapter(self, stored: dict[str, Any] | None, folder: Path) -> None:
        """Raise CheckpointError if a checkpoint's adapter is not this run's, or belongs to another base model."""
        mine = None if self._adapter is None else self._adapter.facts()
        theirs = None if stored is None else {key: value for key, value in stored.items() if key != "base"}
        if mine != theirs:
            said = ["an adapter " + str(one) if one else "no adapter" for one in (theirs, mine)]
            raise CheckpointError(f"{folder} was written with {said[0]}, this run has {said[1]}")
        if stored is not None and self._adapter is not None:
            self._adapter.check_base(stored["base"], folder)


def require_dtype(folder: Path, mine: str, key: str) -> None:
    """Raise CheckpointError if the run that wrote a checkpoint computed in another dtype than `auto` chooses here."""
    began = load_json(folder / ENGINE_FILE).get("compute_dtype", mine)
    if began != mine:
        raise CheckpointError(
            f"{folder} was written by a run that computed in {began}, and {key}: auto chooses {mine} on this machine; "
            f"set {key}={began} to continue as the run began, or {key}={mine} to change it"
        )


def part_file(kind: str, rank: int, ranks: int) -> str:
    return f"{kind}-{rank:05d}-of-{ranks:05d}.safetensors"


def snapshot(path: Path, parts: Iterable[Part]) -> Callable[[], None]:
    """Copy the parts that this rank owns; the returned function writes the copies to `path`."""
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
    """Reads tensors, or parts of them, from the files of all ranks."""

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
            return first.get_tensor(boxes[0].key).clone()  # type: ignore[no-any-return]  # parts count apart
        local = torch.empty(shard.local_shape(), dtype=first.get_slice(boxes[0].key)[:0].dtype)
        for piece in shard.pieces():
            found = sum(self._copy(box, piece, local[piece.at]) for box in boxes)
            if found != piece.numel:
                raise CheckpointError(f"{self.where}: parts of {name} are missing")
        return local

    def _copy(self, box: _Box, piece: Piece, into: Tensor) -> int:
        """Copy the overlap of a box and a piece; return its number of elements."""
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
    """Read (live tensor, its value in the checkpoint); change nothing. Raises CheckpointError on any mismatch."""
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


def part_name(shard: Shard) -> str:
    """Offset and shape of each box of a weight that a rank holds; empty if it holds all of it, or nothing."""
    pieces = shard.pieces()
    if [piece.shape for piece in pieces] == [shard.shape]:
        return ""
    boxes = ((",".join(map(str, one.offset)), ",".join(map(str, one.shape))) for one in pieces)
    return ";".join(f"{offset}+{shape}" for offset, shape in boxes)


def has_blocks(reader: PartsReader, weight: str, shard: Shard) -> bool:
    """Whether quantised state of this part of a weight was stored, or none of the weight at all."""
    start = f"{weight}/"
    keys = [name.removeprefix(start) for name in reader.shapes if name.startswith(start)]
    stored = {key.partition("@")[2] for key in keys if not key.startswith(CODEBOOK)}
    return not stored or not shard.pieces() or part_name(shard) in stored


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
        for name in stored[weight_name] if weight.numel() or not blockwise else ():
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


# ------------------------------------------------------------------------------------------------------------ writing


Job = Callable[[], None]
"""Writes one file from tensors of its own."""


class Writer:
    """A thread that writes copied state to files while training continues. `done` raises a job's error."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._open: list[Future[None]] = []

    def start(self, jobs: Sequence[Job]) -> None:
        """Write after the jobs that were started before."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="hone-checkpoint")
        self._open += [self._pool.submit(job) for job in jobs]

    def done(self, wait: bool) -> bool:
        """Whether all jobs have ended; with `wait`, wait until they have. Raises the OSError of a failed job."""
        if not wait and not all(job.done() for job in self._open):
            return False
        jobs, self._open = self._open, []
        for job in jobs:
            try:
                job.result(timeout=WRITE_S)
            except SafetensorError as error:  # a full disk is an OSError everywhere else
                raise OSError(f"safetensors: {error}") from error
            except TimeoutError as error:
                raise TimeoutError(f"a file was not written within {WRITE_S:.0f} s") from error
        return True
