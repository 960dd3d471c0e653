"""The record of a run: `metrics.jsonl` (one object per step) and `rollouts.jsonl.gz` (one object per trajectory).

    metrics.jsonl       a line for each step
    rollouts.jsonl.gz   training of step 1 | evaluation of step 1 | training of step 2 | ...     a gzip member each

    step k   rollouts.jsonl.gz += a gzip member       each a single write,
             metrics.jsonl     += one line            so a killed process leaves at most one incomplete line or member
             (the trainer saves checkpoint k)
    resume   truncate both files after the last whole line or member with step <= k,
             so the files equal the files of a run that was never stopped

Together the members are an ordinary gzip file: zcat, Python's gzip and pandas read it. A member belongs to one step.

The report, resumed runs and notebooks read these files. So, unlike with other trackers, a failure here ends the run:
training on would leave a gap in the record. No training is lost, because the run resumes from its last checkpoint.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from hone.config import Choice
from hone.full_disk import wait_for_room
from hone.tracking.base import FINISHED, RolloutRecord, RunInfo, Tracker, TrackingError
from hone.tracking.settings import JsonlSettings

METRICS_FILE = "metrics.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl.gz"
LEFT_OUT = "perf/rollouts_left_out"
"""Metric of a step: its rollouts that are not in the file, because of the limit."""
LEVEL = 3  # 38 % of the size in 0.14 s for 5.6 MB; level 6 takes 0.34 s for 34 %
CHUNK = 1 << 18

STEP = re.compile(rb'\{"step": (-?\d+)[,}]')
_GZIP = 31  # zlib's `wbits` for a gzip member
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonlTracker(Tracker):
    """Appends to metrics.jsonl and rollouts.jsonl.gz; a resumed run first removes lines that it will write again."""

    own_thread = False
    left_out = ""  # why the last rollouts were not written

    def __init__(self, settings: Choice, run: RunInfo) -> None:
        self.where = str(run.run_dir / METRICS_FILE)
        chosen = settings if isinstance(settings, JsonlSettings) else JsonlSettings()
        self._metrics = Appender(run.run_dir / METRICS_FILE, run.resumed_from, _kept_lines)
        self._rollouts = RolloutFile(run.run_dir, run.resumed_from, chosen.rollouts_max_mib)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._metrics.write(to_line({"step": step, **{name: values[name] for name in sorted(values)}}))

    def rollouts(self, step: int, records: Sequence[RolloutRecord]) -> None:
        self.left_out = self._rollouts.write(b"".join(to_line(record) for record in records))

    @property
    def last_step(self) -> int | None:
        """The step of the last line that the file had when it was opened, after truncation."""
        return self._metrics.last_step

    def flush(self) -> None:
        self._metrics.flush()
        self._rollouts.flush()

    def close(self, outcome: str = FINISHED) -> None:
        self._metrics.close()
        self._rollouts.close()


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The metrics of each step of a run, with the key `step`, in order. Skips an incomplete last line.

    Raises TrackingError, with the line's number, for any other line that is not valid.
    """
    path = run_dir / METRICS_FILE
    steps: list[dict[str, float]] = []
    for number, line in enumerate(whole_lines(path), start=1):
        record = parse_line(path, number, line)
        numbers = {name: to_float(value) for name, value in record.items()}
        steps.append({name: number for name, number in numbers.items() if number is not None})
    return steps


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
    if isinstance(value, int) and value.bit_length() > 1000:  # more than a float holds
        return None
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
        rest, since = memoryview(part), 0.0
        try:
            while rest:
                try:
                    rest = rest[os.write(self._fd, rest) :]
                except OSError as error:
                    since = wait_for_room(error, since)
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


def _kept_lines(path: Path, resumed_from: int) -> tuple[int, int | None]:
    """The size in bytes of the whole lines up to the step that a run resumes from, and the last such step."""
    size, last = 0, None
    for number, line in enumerate(whole_lines(path), start=1):
        found = STEP.match(line)
        if found is None or not line.rstrip().endswith(b"}"):
            raise TrackingError(
                f"{path} line {number} should begin with a step, found {line[:60]!r}; the file was damaged or edited: "
                "repair the line, or move the file away"
            )
        if int(found[1]) > resumed_from:
            break
        size, last = size + len(line), int(found[1])
    return size, last


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
    for member in members(path):
        yield from (line for line in member.text.splitlines(keepends=True) if line.endswith(b"\n"))


class Member(NamedTuple):
    end: int  # its last byte in the file is before this one
    text: bytes
    whole: bool  # else the file ends within it


def members(path: Path, start: int = 0) -> Iterator[Member]:
    with path.open("rb") as file:
        file.seek(start)
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
            yield Member(file.tell() - len(packed), b"".join(parts), inflate.eof)


def _kept_members(path: Path, resumed_from: int) -> tuple[int, int | None]:
    """The size in bytes of the whole members up to the step that a run resumes from, and the last such step."""
    size, last = 0, None
    for member in members(path):
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
