"""Checkpoints that are whole or absent: written to a `.partial` folder, sealed by a manifest, then renamed.

    begin    checkpoints/.step_00000050.partial/   <- parts write their files here, from copies: training may go on
                 actor/ critic/ state.json
    publish      manifest.json                     <- when all are there: size and SHA-256 of each file, flushed
             checkpoints/step_00000050/            <- one rename makes it visible

The loop calls `publish` between steps; it returns at once while threads still write files or compute checksums. Only
the loop's thread talks to other ranks. A process killed at any moment leaves either the old set of checkpoints or the
new one. What a kill leaves behind (`.partial` folders) is removed when the next run starts. Nothing here is pickled:
tensors are safetensors, the rest is JSON.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hone import __version__
from hone.full_disk import is_full, until_room
from hone.models.files.partial import sync
from hone.runtime import ranks
from hone.runtime.watchdog import progress

MANIFEST = "manifest.json"
STATE = "state.json"
FORMAT = 1
CHUNK = 1 << 22  # bytes of a file that are summed up between two signs of progress
WAIT_S = 1.0  # between two signs of progress while a thread seals
SEAL_S = 3600.0  # longest time for reading what was written: a disk that takes longer does not answer

PartWriter = Callable[[Path], None]
"""Writes one part (an engine's state, say) into an existing, empty folder; at once, or from copies in a thread."""

WrittenFn = Callable[[bool], bool]
"""`written(wait)`: whether the parts that are written in threads are on the disk, on every rank; raises OSError."""


class RunCheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message names the folder and what to do."""


class DiskFull(RunCheckpointError):
    """The disk had no room for a checkpoint, and nobody made any."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One sealed checkpoint: where it is, the step it was taken after, and the trainer's own state."""

    folder: Path
    step: int
    state: Mapping[str, Any]
    score: float | None  # of the evaluation at this step, which `best` compares; None if there was none

    def part(self, name: str) -> Path:
        """The folder of one part. Raises RunCheckpointError if the run that wrote the checkpoint had no such part."""
        folder = self.folder / name
        if not folder.is_dir():
            raise RunCheckpointError(
                f"checkpoint {self.folder} has no {name}: the settings that need one were added to the run later; "
                "take them back, or start a new run with run.dir=FOLDER"
            )
        return folder


@dataclass(slots=True)
class _Pending:
    """A checkpoint that is not published yet."""

    step: int
    partial: Path
    written: WrittenFn
    sealed: Future[None] | None = None  # set when every part is on the disk; on the first rank only


class CheckpointStore:
    """The checkpoints of one run: the last `keep`, and the best one by an evaluation's score."""

    def __init__(self, folder: Path, keep: int, keep_best: bool = True) -> None:
        self._folder = folder
        self._keep = keep
        self._keep_best = keep_best
        self._pending: _Pending | None = None
        self._sealing = ThreadPoolExecutor(1, thread_name_prefix="hone-seal")

    def prepare(self) -> None:
        """Create the folder and clear away what an interrupted save left."""
        if ranks.is_first():
            self._folder.mkdir(parents=True, exist_ok=True)
            for partial in self._folder.glob(".*.partial"):
                shutil.rmtree(partial)
        ranks.meet()

    def save(
        self, step: int, parts: Mapping[str, PartWriter], state: Mapping[str, Any], score: float | None = None
    ) -> Path:
        """Begin and publish the checkpoint of `step`, whose parts write at once; returns its folder."""
        self.begin(step, parts, state, score)
        self.publish(wait=True)
        return self._final(step)

    def begin(
        self,
        step: int,
        parts: Mapping[str, PartWriter],
        state: Mapping[str, Any],
        score: float | None = None,
        written: WrittenFn = lambda wait: True,
    ) -> None:
        """Start the checkpoint of `step`; when this returns, what it will hold no longer changes.

        Every rank calls this, and `publish`: each writes its own files, and the first seals what all have written. An
        earlier checkpoint that is still being written is waited for.

        Each rank waits while the disk is full, also if it has less room than the last checkpoint's size and a tenth
        more. Raises DiskFull if that lasts.
        """
        self.publish(wait=True)
        pending = _Pending(step, self._folder / f".step_{step:08d}.partial", written)
        with self._abandon_on_error(pending):
            self._make_room(pending.partial, parts)
            for name, write in parts.items():
                write(pending.partial / name)
            if ranks.is_first():
                content = {"format": FORMAT, "hone": __version__, "step": step, "score": score, "state": state}
                until_room(lambda: _write_json(pending.partial / STATE, content))
        self._pending = pending

    @property
    def has_pending(self) -> bool:
        """Return whether a checkpoint is on its way to the disk."""
        return self._pending is not None

    def publish(self, wait: bool) -> bool:
        """Make what was begun visible if all of it is on the disk, and remove those that are no longer kept.

        Returns whether nothing is left to do; with `wait`, once that is so. Raises RunCheckpointError if it cannot be
        written, DiskFull if the disk stays full: the checkpoint is given up, and earlier ones stay.
        """
        pending = self._pending
        if pending is None:
            return True
        with self._abandon_on_error(pending):
            if pending.sealed is None:
                if not pending.written(wait):
                    return False
                ranks.meet()  # parts that are not written in threads are complete on every rank, too
                pending.sealed = self._sealing.submit(_seal if ranks.is_first() else _seal_nothing, pending.partial)
            if not wait and ranks.agree(int(not pending.sealed.done())):
                return False
            ends = time.monotonic() + SEAL_S
            while wait and ranks.agree(int(not pending.sealed.done() and time.monotonic() < ends)):
                futures.wait([pending.sealed], timeout=WAIT_S)
                progress()  # on every rank: this wait has its own deadline
            if not pending.sealed.done():
                raise TimeoutError(f"its files could not be summed up within {SEAL_S:.0f} s")
            pending.sealed.result(timeout=0)
            if ranks.is_first():
                self._make_visible(pending)
        self._pending = None
        ranks.meet()
        return True

    @contextmanager
    def _abandon_on_error(self, pending: _Pending) -> Iterator[None]:
        """A checkpoint that cannot be written is given up."""
        try:
            yield
        except OSError as error:
            self._pending = None
            shutil.rmtree(pending.partial, ignore_errors=True)
            said = (
                f"cannot write the checkpoint of step {pending.step} into {self._folder}: {error}; earlier ones stand"
            )
            if is_full(error):
                raise DiskFull(f"{said}: make room, and run the same command again to continue") from error
            raise RunCheckpointError(said) from error

    def _make_visible(self, pending: _Pending) -> None:
        final = self._final(pending.step)
        if final.exists():
            shutil.rmtree(final)
        pending.partial.rename(final)
        sync(self._folder)
        self._remove_old()

    def _final(self, step: int) -> Path:
        return self._folder / f"step_{step:08d}"

    def _make_room(self, whole: Path, parts: Mapping[str, PartWriter]) -> None:
        """Empty folders for the parts, there for every rank when this returns."""
        if ranks.is_first():
            if whole.exists():
                shutil.rmtree(whole)
            until_room(self._require_room)
            for folder in (whole, *(whole / name for name in parts)):
                until_room(partial(folder.mkdir, parents=True, exist_ok=True))
        ranks.meet()

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint, verified byte by byte; None if there is none.

        Raises RunCheckpointError for a damaged one, naming the earlier one that would be continued from without it.
        """
        folders = self._published()
        return self.read(folders[-1]) if folders else None

    def read(self, folder: Path) -> Checkpoint:
        """One verified checkpoint. Raises RunCheckpointError if it is damaged, or of another format."""
        problem = damage(folder)
        if problem:
            earlier = [f.name for f in self._published() if f.name < folder.name]
            way_out = f"continue from {earlier[-1]}" if earlier else "start from the beginning"
            raise RunCheckpointError(f"checkpoint {folder} is damaged: {problem}; remove it to {way_out}")
        content = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise RunCheckpointError(
                f"checkpoint {folder} has format {content['format']} of hone {content['hone']}, and hone {__version__} "
                f"reads format {FORMAT}: continue with that version; or write an export with it (hone export), and "
                "begin a run from the export (model.path)"
            )
        return Checkpoint(folder, content["step"], content["state"], content["score"])

    def best(self) -> Path | None:
        """The published checkpoint with the highest score; the earliest of equals. None if none has a finite one."""
        scored = [(score, folder) for folder in self._published() if (score := _score(folder)) is not None]
        return max(scored, key=lambda pair: (pair[0], -_step(pair[1])))[1] if scored else None

    @property
    def best_score(self) -> float | None:
        """The highest score of a published checkpoint."""
        best = self.best()
        return None if best is None else _score(best)

    def _published(self) -> list[Path]:
        return sorted(f for f in self._folder.glob("step_*") if f.is_dir()) if self._folder.is_dir() else []

    def _remove_old(self) -> None:
        kept = set(self._published()[-self._keep :])
        best = self.best() if self._keep_best else None
        for folder in self._published():
            if folder not in kept and folder != best:
                # Unpublish first: a kill in the middle of rmtree must not leave a damaged checkpoint under its name.
                doomed = folder.with_name(f".{folder.name}.partial")
                folder.rename(doomed)
                shutil.rmtree(doomed)

    def _require_room(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        published = self._published()
        if not published:
            return
        needed = int(1.1 * sum(f.stat().st_size for f in published[-1].rglob("*") if f.is_file()))
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            told = f"{free / 2**20:,.1f} MiB are free, and it takes about {needed / 2**20:,.1f} MiB"
            raise OSError(errno.ENOSPC, f"no room for a checkpoint: {told}", str(self._folder))


def damage(folder: Path) -> str:
    """Return the faults of a checkpoint folder: missing, truncated or changed files; empty if there are none."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return f"{MANIFEST} is missing"
    try:
        files: dict[str, dict[str, Any]] = json.loads(manifest.read_text(encoding="utf-8"))["files"]
    except (json.JSONDecodeError, KeyError, UnicodeDecodeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, {expected['bytes']} were written"
        if _sha256(path, progress) != expected["sha256"]:
            return f"{name} is not what was written (its SHA-256 differs)"
    return ""


def _seal(partial: Path) -> None:
    content = {"format": FORMAT, "files": _fingerprints(partial)}
    until_room(lambda: _write_json(partial / MANIFEST, content))
    sync(partial)


def _seal_nothing(partial: Path) -> None:
    """Another rank seals."""


def _fingerprints(folder: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        sync(path)
        found[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    return found


def _sha256(path: Path, progressed: Callable[[], None] = lambda: None) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            found.update(chunk)
            progressed()
    return found.hexdigest()


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _score(folder: Path) -> float | None:
    try:
        found = json.loads((folder / STATE).read_text(encoding="utf-8"))["score"]
    except (OSError, json.JSONDecodeError, KeyError):
        return None  # a damaged checkpoint is nobody's best; reading it to resume says what is wrong
    return float(found) if found is not None and math.isfinite(found) else None


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))
