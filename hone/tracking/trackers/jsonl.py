"""The record of a run: `metrics.jsonl` (one object per step) and `rollouts.jsonl` (one object per trajectory).

    step k   rollouts.jsonl += lines of step k        each a single write of whole lines,
             metrics.jsonl  += one line               so a killed process leaves at most one incomplete last line
             (the trainer saves checkpoint k)
    resume   truncate both files after the last whole line with step <= k,
             so the files equal the files of a run that was never stopped

The report, resumed runs and notebooks read these files. So, unlike with other trackers, a failure here ends the run:
training on would leave a gap in the record. No training is lost, because the run resumes from its last checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hone.config import Choice
from hone.tracking.base import RolloutRecord, RunInfo, Tracker, TrackingError

METRICS_FILE = "metrics.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"

_STEP = re.compile(rb'\{"step": (-?\d+)[,}]')
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonlTracker(Tracker):
    """Appends to the two files, and removes the lines that a resumed run will write again."""

    own_thread = False

    def __init__(self, settings: Choice, run: RunInfo) -> None:
        self.where = str(run.run_dir / METRICS_FILE)
        self._metrics = _Appender(run.run_dir / METRICS_FILE, run.resumed_from)
        self._rollouts = _Appender(run.run_dir / ROLLOUTS_FILE, run.resumed_from)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._metrics.write(to_line({"step": step, **{name: values[name] for name in sorted(values)}}))

    def rollouts(self, step: int, records: Sequence[RolloutRecord]) -> None:
        self._rollouts.write(b"".join(to_line(record) for record in records))

    @property
    def last_step(self) -> int | None:
        """The step of the last line that the file had when it was opened, after truncation."""
        return self._metrics.last_step

    def flush(self) -> None:
        self._metrics.flush()
        self._rollouts.flush()

    def close(self) -> None:
        self._metrics.close()
        self._rollouts.close()


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


class _Appender:
    """A file of lines in step order, truncated after the step that the run resumes from, then appended to."""

    def __init__(self, path: Path, resumed_from: int | None) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._size, self.last_step = _keep(path, resumed_from)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.ftruncate(self._fd, self._size)
            os.fsync(self._fd)
        except OSError as error:
            raise TrackingError(f"cannot open {path}: {error.strerror or error}") from error

    def write(self, lines: bytes) -> None:
        rest = memoryview(lines)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except BaseException as error:  # on Ctrl-C too: write all of the lines or none
            with suppress(OSError):  # if this fails, the next start removes the incomplete line
                os.ftruncate(self._fd, self._size)
            if not isinstance(error, OSError):
                raise
            raise TrackingError(
                f"cannot write {self._path}: {error.strerror or error}; the run stops, because its record would have "
                "a gap; run the same command again to continue from the last checkpoint"
            ) from error
        self._size += len(lines)

    def flush(self) -> None:
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise TrackingError(f"cannot write {self._path}: {error.strerror or error}") from error

    def close(self) -> None:
        os.close(self._fd)


def _keep(path: Path, resumed_from: int | None) -> tuple[int, int | None]:
    """The size in bytes of the whole lines up to the step that a run resumes from, and the last such step."""
    size, last = 0, None
    if resumed_from is None or not path.exists():
        return size, last
    for number, line in enumerate(whole_lines(path), start=1):
        found = _STEP.match(line)
        if found is None or not line.rstrip().endswith(b"}"):
            raise TrackingError(
                f"{path} line {number} should begin with a step, found {line[:60]!r}; the file was damaged or edited: "
                "repair the line, or move the file away"
            )
        if int(found[1]) > resumed_from:
            break
        size, last = size + len(line), int(found[1])
    return size, last
