"""The record of a run: `metrics.jsonl` (one object per step) and `rollouts.jsonl.gz` (one object per trajectory).

    step k   rollouts.jsonl.gz += a gzip member       each a single write,
             metrics.jsonl     += one line            so a killed process leaves at most one incomplete line or member
             (the trainer saves checkpoint k)
    resume   truncate both files after the last whole line or member with step <= k,
             so the files equal the files of a run that was never stopped

The report, resumed runs and notebooks read these files. So, unlike with other trackers, a failure here ends the run:
training on would leave a gap in the record. No training is lost, because the run resumes from its last checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hone.config import Choice
from hone.tracking.base import RolloutRecord, RunInfo, Tracker, TrackingError
from hone.tracking.settings import JsonlSettings
from hone.tracking.trackers.lines import STEP, Appender, RolloutFile, parse_line, to_float, to_line, whole_lines

METRICS_FILE = "metrics.jsonl"


class JsonlTracker(Tracker):
    """Appends to the two files, and removes the lines that a resumed run will write again."""

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

    def close(self) -> None:
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
