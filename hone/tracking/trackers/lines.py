"""Files of JSON lines that a run appends to: whole lines, plain (metrics) or compressed (rollouts).

    metrics.jsonl       a line for each step
    rollouts.jsonl.gz   training of step 1 | evaluation of step 1 | training of step 2 | ...     a gzip member each

Together the members are an ordinary gzip file: zcat, Python's gzip and pandas read it. A member belongs to one step, so
a resumed run truncates the file between two members.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from hone.tracking.base import TrackingError

ROLLOUTS_FILE = "rollouts.jsonl.gz"
LEFT_OUT = "perf/rollouts_left_out"
"""Metric of a step: its rollouts that are not in the file, because of the limit."""
LEVEL = 3  # 38 % of the size in 0.14 s for 5.6 MB; level 6 takes 0.34 s for 34 %
CHUNK = 1 << 18

STEP = re.compile(rb'\{"step": (-?\d+)[,}]')
_GZIP = 31  # zlib's `wbits` for a gzip member
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_line(record: Mapping[str, Any]) -> bytes:
    """One line of JSON. Floats keep every digit; NaN and infinities become strings that `float()` can parse."""
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False, default=str)
    except ValueError:
        text = json.dumps(_spell_out(record), ensure_ascii=False, allow_nan=False, default=str)
    return text.encode("utf-8", errors="replace") + b"\n"


def _spell_out(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _spell_out(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_spell_out(inner) for inner in value]
    return value


def to_float(value: Any) -> float | None:
    """A number from a line (NaN and infinities are text there); None for anything else. An int stays an int."""
    if isinstance(value, str):
        return _NOT_FINITE.get(value)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def whole_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file that end with a newline; one without is incomplete, or is being written right now."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line


def parse_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise TrackingError(f"{path} line {number} is not JSON ({error}); the file was damaged or edited") from error
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise TrackingError(f"{path} line {number} should be an object with an integer 'step', found {line[:60]!r}")
    return record


KeepFn = Callable[[Path, int], tuple[int, int | None]]
"""(path, step) -> size in bytes of what a file has up to this step, and the last such step. Raises TrackingError."""


class Appender:
    """A file in step order, truncated after the step that the run resumes from, then appended to."""

    def __init__(self, path: Path, resumed_from: int | None, keep: KeepFn) -> None:
        self._path = path
        self.size, self.last_step = 0, None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if resumed_from is not None and path.exists():
                self.size, self.last_step = keep(path, resumed_from)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.ftruncate(self._fd, self.size)
            os.fsync(self._fd)
        except OSError as error:
            raise TrackingError(f"cannot open {path}: {error.strerror or error}") from error

    def write(self, part: bytes) -> None:
        rest = memoryview(part)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except BaseException as error:  # on Ctrl-C too: write all of it or nothing
            with suppress(OSError):  # if this fails, the next start removes the incomplete part
                os.ftruncate(self._fd, self.size)
            if not isinstance(error, OSError):
                raise
            raise TrackingError(
                f"cannot write {self._path}: {error.strerror or error}; the run stops, because its record would have "
                "a gap; run the same command again to continue from the last checkpoint"
            ) from error
        self.size += len(part)

    def flush(self) -> None:
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise TrackingError(f"cannot write {self._path}: {error.strerror or error}") from error

    def close(self) -> None:
        os.close(self._fd)


class RolloutFile:
    """Appends members as long as the file stays below its limit."""

    def __init__(self, run_dir: Path, resumed_from: int | None, max_mib: int) -> None:
        self._path = run_dir / ROLLOUTS_FILE
        self._max_mib = max_mib
        self._file = Appender(self._path, resumed_from, _kept_members)

    def write(self, lines: bytes) -> str:
        """Write the lines of one step and set as one member; why that was not done, or an empty text.

        The answer depends on the size of the file alone, so a resumed run leaves out what it left out before.
        """
        if not lines:
            return ""
        member = gzip.compress(lines, LEVEL, mtime=0)  # a time would make the files of two equal runs differ
        if self._file.size + len(member) > self._max_mib * 2**20:
            return f"{self._path} has reached its limit, rollouts_max_mib = {self._max_mib}"
        self._file.write(member)
        return ""

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def rollout_lines(path: Path) -> Iterator[bytes]:
    """The whole lines of a `rollouts.jsonl.gz`, also of an incomplete last member, or of such a file unpacked.

    Raises TrackingError at a place that is damaged.
    """
    if path.suffix != ".gz":
        yield from whole_lines(path)
        return
    for member in _members(path):
        yield from (line for line in member.text.splitlines(keepends=True) if line.endswith(b"\n"))


class _Member(NamedTuple):
    end: int  # its last byte in the file is before this one
    text: bytes
    whole: bool  # else the file ends within it


def _members(path: Path) -> Iterator[_Member]:
    with path.open("rb") as file:
        packed = file.read(CHUNK)
        while packed:
            inflate, parts = zlib.decompressobj(_GZIP), []
            start = file.tell() - len(packed)
            while packed and not inflate.eof:
                try:
                    parts.append(inflate.decompress(packed))
                except zlib.error as error:
                    raise TrackingError(
                        f"{path} is damaged after byte {start:,} ({error}): move it away; "
                        f"head -c {start} {path.name} | zcat shows what is whole"
                    ) from error
                packed = inflate.unused_data or file.read(CHUNK)
            yield _Member(file.tell() - len(packed), b"".join(parts), inflate.eof)


def _kept_members(path: Path, resumed_from: int) -> tuple[int, int | None]:
    """The size in bytes of the whole members up to the step that a run resumes from, and the last such step."""
    size, last = 0, None
    for member in _members(path):
        if not member.whole:
            break
        steps = [_step(path, line) for line in (member.text, member.text.rstrip().rpartition(b"\n")[2])]
        if steps[0] > resumed_from:
            break
        if steps[0] != steps[1]:
            raise TrackingError(
                f"{path} has steps {steps[0]} to {steps[1]} in one gzip member, which hone does not write: it was "
                "edited; move it away"
            )
        size, last = member.end, steps[0]
    return size, last


def _step(path: Path, line: bytes) -> int:
    found = STEP.match(line)
    if found is None:
        raise TrackingError(
            f"{path} has a line that should begin with a step, found {line[:60]!r}; the file was damaged or edited: "
            "move it away"
        )
    return int(found[1])


__all__ = [
    "LEFT_OUT",
    "ROLLOUTS_FILE",
    "STEP",
    "Appender",
    "RolloutFile",
    "parse_line",
    "rollout_lines",
    "to_float",
    "to_line",
    "whole_lines",
]
