"""The files of a checkpoint: written from copies, by a thread, and read box by box."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hone.engines.parts import Part, Piece, Shard
from hone.models.files.tensors import save_tensors

FORMAT = 2
MODEL, OPTIMIZER, ENGINE_FILE = "model", "optimizer", "engine.json"
WRITE_S = 3600.0  # longest wait for one file: a disk that takes longer does not answer


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file and what is wrong with it."""


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
    return partial(save_tensors, tensors, path, {"boxes": json.dumps(boxes)})


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


# ------------------------------------------------------------------------------------------------------------ writing


Job = Callable[[], None]
"""Writes one file from tensors of its own."""


class Writer:
    """A thread that writes copied state to files while training continues. `done` raises a job's error."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._open: list[Future[None]] = []

    def start(self, jobs: Sequence[Job]) -> None:
        """Write after the jobs that were started before. Jobs of a checkpoint that was given up are forgotten."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="hone-checkpoint")
        self._open = [self._pool.submit(job) for job in jobs]

    def done(self, wait: bool) -> bool:
        """Return whether all jobs have ended; with `wait`, wait until they have. Raises the OSError of a failed job."""
        if not wait and not all(job.done() for job in self._open):
            return False
        jobs, self._open = self._open, []
        for job in jobs:
            try:
                job.result(timeout=WRITE_S)
            except TimeoutError as error:
                raise TimeoutError(f"a file was not written within {WRITE_S:.0f} s") from error
        return True
