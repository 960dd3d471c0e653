"""Read a run folder for its report: the files that exist at this moment, reduced to a size that a page can hold."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from hone.config import ConfigError
from hone.tracking.base import FAILURE_FILE, TrackingError
from hone.tracking.facts import RUN_FILE
from hone.tracking.findings import marks_of, read_findings
from hone.tracking.report.charts import step_phases
from hone.tracking.report.columns import Columns, MetricsFile, thinned
from hone.tracking.report.prediction import Prediction, read_prediction
from hone.tracking.report.rows import MAX_TEXT, MAX_TOKENS, rollout_row, short
from hone.tracking.rollouts import spread
from hone.tracking.trackers.jsonl import (
    LEFT_OUT,
    METRICS_FILE,
    ROLLOUTS_FILE,
    STEP,
    rollout_lines,
)

CONFIG_FILE = "config.yaml"
IN_PHASE = "in phase "  # begins the note that `Timer.phase` adds to an error
HELD = "memory of this process: "  # begins the note that an error of memory gets at the end of a run

MAX_POINTS = 2_000  # per curve; more are thinned to the minimum and maximum of each interval
MAX_COLUMNS = 300  # of the chart of a step's time
MAX_ROWS = 3_000  # rollouts on the page
MAX_BYTES = 10_000_000  # of all rollouts together

_SAMPLE = re.compile(rb', "sample": ')  # the keys before it are equal in all answers to one prompt
_KEYS = 2_000  # bytes at the start of a line that are searched for them
_BYTES_PER_TOKEN = 45  # in a line of rollouts.jsonl.gz: text, id, two log-probs


@dataclass(slots=True)
class RunData:
    """The content of a page. `notes` are sentences about what is missing, skipped or thinned."""

    facts: dict[str, Any] = field(default_factory=dict)
    config: str = ""
    columns: Columns = field(default_factory=Columns)
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    rollouts_total: int = 0
    notes: list[str] = field(default_factory=list)
    failure: str = ""  # the traceback of a run that failed
    marks: list[dict[str, Any]] = field(default_factory=list)  # on its charts: what its rules found, and when
    prediction: Prediction | None = None
    written: float | None = None  # when metrics.jsonl was last written, seconds since the epoch

    @property
    def names(self) -> list[str]:
        """Every metric name, sorted."""
        return self.columns.names

    @property
    def steps(self) -> list[dict[str, float]]:
        """The metrics of each step, with the key `step`, in order."""
        return self.columns.rows()


def require_run(run_dir: Path) -> None:
    """Raise ConfigError if the folder is not a run folder."""
    if not run_dir.is_dir():
        raise ConfigError(f"no run folder {run_dir}")
    if not any((run_dir / name).is_file() for name in (METRICS_FILE, CONFIG_FILE, RUN_FILE)):
        raise ConfigError(f"{run_dir} is not a run folder: it has no {METRICS_FILE}, {CONFIG_FILE} or {RUN_FILE}")


def read_run(run_dir: Path) -> RunData:
    """Read everything that a report shows. Raises ConfigError if the folder is not a run folder."""
    require_run(run_dir)
    data = RunData()
    data.facts = read_facts(run_dir / RUN_FILE, data.notes)
    data.config = read_text(run_dir / CONFIG_FILE, data.notes)
    data.failure = read_failure(run_dir)
    data.marks = marks_of(read_findings(run_dir, data.notes))
    _read_steps(run_dir / METRICS_FILE, data)
    data.prediction = read_prediction(run_dir, data.columns)
    _read_rollouts(run_dir / ROLLOUTS_FILE, data)
    for other in sorted(run_dir.glob(f"*/{METRICS_FILE}")):
        data.notes.append(f"{other.parent.name}/ is a separate run with its own page: hone report {other.parent}")
    return data


def curves(
    data: RunData, names: Iterable[str] | None = None, most: int = MAX_POINTS
) -> tuple[list[list[int]], dict[str, dict[str, Any]]]:
    """The distinct step lists, and for each metric its list and its values; non-finite values are text.

    `names`: of these metrics; None: of all. `most`: points of a curve, as `thinned` keeps them.
    """
    axes: list[list[int]] = []
    places: dict[tuple[int, ...], int] = {}
    series: dict[str, dict[str, Any]] = {}
    for name in data.names if names is None else names:
        column = data.columns[name]
        kept = list(thinned(column, most))
        axis = tuple(step for step, _ in kept)
        if axis not in places:
            places[axis] = len(axes)
            axes.append(list(axis))
        series[name] = {"axis": places[axis], "values": [short(value) for _, value in kept]}
        if len(kept) < len(column.values):
            series[name]["of"] = len(column.values)
    return axes, series


def time_by_phase(data: RunData) -> dict[str, Any]:
    """The seconds of a step by phase, averaged over stretches of steps: at most `MAX_COLUMNS`.

    `steps`: the first step of each stretch; `bands`: phase -> mean seconds; `rest`: the mean seconds that no phase has.
    A phase that a step does not have took no time in it.
    """
    phases = step_phases(data.names)
    timed = data.columns["perf/step_s"].finite() if phases else []
    if not phases or not timed:
        return {"steps": [], "bands": {}, "rest": []}
    spent = {name: dict(data.columns[name].finite()) for name in phases}
    columns = min(len(timed), MAX_COLUMNS)
    cuts = [round(i * len(timed) / columns) for i in range(columns + 1)]
    stretches = [timed[a:b] for a, b in pairwise(cuts)]
    bands = {name: [_mean(of.get(step, 0.0) for step, _ in part) for part in stretches] for name, of in spent.items()}
    whole = [_mean(seconds for _, seconds in part) for part in stretches]
    rest = [max(total - sum(band[i] for band in bands.values()), 0.0) for i, total in enumerate(whole)]
    return {
        "steps": [part[0][0] for part in stretches],
        "bands": {name: [short(value) for value in band] for name, band in bands.items()},
        "rest": [short(value) for value in rest],
    }


def _mean(values: Iterable[float]) -> float:
    above = [max(value, 0.0) for value in values]
    return sum(above) / len(above)


# ------------------------------------------------------------------------------------------------------- the files


def read_facts(path: Path, notes: list[str]) -> dict[str, Any]:
    """The content of `run.json`; empty if there is none, which `notes` then says."""
    if not path.is_file():
        notes.append(f"There is no {path.name}, so the start and end of the run are unknown.")
        return {}
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        notes.append(f"{path.name} is not a JSON object and was ignored.")
        return {}
    return facts


def read_failure(run_dir: Path) -> str:
    """The end of the traceback that a failed run leaves; empty if a run has begun in the folder since."""
    path, facts = run_dir / FAILURE_FILE, run_dir / RUN_FILE
    if not path.is_file() or (facts.is_file() and path.stat().st_mtime_ns < facts.stat().st_mtime_ns):
        return ""
    return path.read_text(encoding="utf-8", errors="replace")[-MAX_TEXT:]


def cause_of(failure: str) -> str:
    """The line of a traceback that names the error; the notes below it name phase and memory."""
    lines = (line for line in reversed(failure.splitlines()) if line.strip() and not line.startswith((IN_PHASE, HELD)))
    return next(lines, "")


def read_text(path: Path, notes: list[str]) -> str:
    """The text of the run's settings; empty if there is none, which `notes` then says."""
    if not path.is_file():
        notes.append(f"There is no {path.name}, so the settings of the run are unknown.")
        return ""
    return path.read_text(encoding="utf-8", errors="replace")


def _read_steps(path: Path, data: RunData) -> None:
    file = MetricsFile(path)
    if path.is_file():
        while file.read():
            pass
    data.columns, data.written = file.columns, file.written
    data.notes += metrics_notes(path, file.columns)


def metrics_notes(path: Path, columns: Columns) -> list[str]:
    """Sentences about missing parts of `metrics.jsonl`."""
    if not path.is_file():
        return [f"There is no {path.name}: no step was logged yet."]
    notes = unread_lines(path, columns)
    if columns.not_finite:
        notes.append(f"{columns.not_finite} values are not finite (NaN or infinite); the charts mark them.")
    return notes


def unread_lines(path: Path, columns: Columns) -> list[str]:
    """A sentence about lines of `metrics.jsonl` that could not be read; empty if there are none."""
    if columns.broken:
        return [f"{columns.broken:,} lines of {path.name} could not be read and were skipped."]
    size = path.stat().st_size if path.is_file() and not columns.lines else 0
    return [f"{path.name} has {size:,} bytes, but no whole line, so it could not be read."] if size else []


def _read_rollouts(path: Path, data: RunData) -> None:
    if not path.is_file():
        data.notes.append(f"There is no {path.name}: this run wrote no rollouts.")
        return
    lines = _index(path, data.notes)
    data.rollouts_total = len(lines)
    wanted = sorted(line.number for line in _chosen(lines))
    broken = 0
    for number, text in zip(wanted, _numbered(rollout_lines(path), wanted), strict=True):
        record = _parse(text)
        if record is None:
            broken += 1
        else:
            data.rollouts.append(rollout_row(number, record))
    if broken:
        data.notes.append(f"{broken} lines of {path.name} could not be read and were skipped.")
    if len(data.rollouts) + broken < len(lines):
        data.notes.append(
            f"This page has {len(data.rollouts):,} of {len(lines):,} rollouts: whole groups, spread evenly over the "
            f"steps; all of them are in {path.name}."
        )
    data.notes += limit_notes(path, data.columns)


def limit_notes(path: Path, columns: Columns) -> list[str]:
    """A sentence about rollouts that the limit left out; empty if there are none."""
    full = [(step, count) for step, count in columns[LEFT_OUT].finite() if count] if LEFT_OUT in columns else []
    if not full:
        return []
    return [
        f"{path.name} reached its limit (rollouts_max_mib of the tracker jsonl) in step {full[0][0]}: it "
        f"keeps the rollouts before, and {int(sum(count for _, count in full)):,} later ones are not in it."
    ]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


class _Line(NamedTuple):
    """A line of `rollouts.jsonl.gz`."""

    number: int  # of all lines, from 0
    length: int  # in bytes
    step: int
    group: bytes  # the same for answers to one prompt


def _index(path: Path, notes: list[str]) -> list[_Line]:
    lines: list[_Line] = []
    step = 0
    try:
        for line in rollout_lines(path):
            found = STEP.match(line)
            step = int(found[1]) if found else step  # keys in another order: take the step of the line before
            lines.append(_Line(len(lines), len(line), step, _SAMPLE.split(line[:_KEYS], maxsplit=1)[0]))
    except TrackingError as error:
        notes.append(f"{error}. This page has rollouts from before that place.")
    return lines


def _numbered(lines: Iterator[bytes], wanted: Sequence[int]) -> Iterator[bytes]:
    """The lines with these numbers, in ascending order. Reads none after the last of them."""
    position = 0
    for number in wanted:
        yield from islice(lines, number - position, number - position + 1)
        position = number + 1


def _chosen(lines: Sequence[_Line]) -> list[_Line]:
    """As many lines as the page can hold: whole groups, spread evenly over the steps."""
    by_step: dict[int, list[list[_Line]]] = {}
    for (step, _), members in groupby(lines, key=lambda line: (line.step, line.group)):
        by_step.setdefault(step, []).append(list(members))
    rows = min(MAX_ROWS, len(lines))
    while rows > 1:
        chosen = _spread_over(by_step, rows)
        size = sum(min(line.length, MAX_TOKENS * _BYTES_PER_TOKEN) for line in chosen)
        if size <= MAX_BYTES:
            return chosen
        rows = min(rows - 1, int(rows * MAX_BYTES / size))
    return list(lines[-1:])


def _spread_over(by_step: Mapping[int, Sequence[Sequence[_Line]]], rows: int) -> list[_Line]:
    """Deal whole groups to the steps in turn, as long as they fit into `rows`."""
    every = list(by_step)
    firsts = sum(len(groups[0]) for groups in by_step.values())
    steps = [every[position] for position in spread(len(every), max(rows * len(every) // firsts, 1))]
    quota = dict.fromkeys(steps, 0)
    left, dealt = rows, True
    while dealt:
        dealt = False
        for step in steps:
            if quota[step] < len(by_step[step]) and (size := len(by_step[step][quota[step]])) <= left:
                quota[step], left, dealt = quota[step] + 1, left - size, True
    chosen = [by_step[step][position] for step in steps for position in spread(len(by_step[step]), quota[step])]
    return [line for group in chosen for line in group][:rows]
