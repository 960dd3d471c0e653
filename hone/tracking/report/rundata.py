"""Read a run folder for its report: the files that exist at this moment, reduced to a size that a page can hold."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from hone.config import ConfigError
from hone.tracking.base import FAILURE_FILE, TrackingError
from hone.tracking.report.charts import step_phases
from hone.tracking.rollouts import spread
from hone.tracking.trackers.jsonl import (
    LEFT_OUT,
    METRICS_FILE,
    ROLLOUTS_FILE,
    STEP,
    rollout_lines,
    to_float,
    whole_lines,
)

CONFIG_FILE = "config.yaml"
RUN_FILE = "run.json"

MAX_POINTS = 2_000  # per curve; more are thinned to the minimum and maximum of each interval
MAX_COLUMNS = 300  # of the chart of a step's time
MAX_ROWS = 3_000  # rollouts on the page
MAX_BYTES = 10_000_000  # of all rollouts together
MAX_TOKENS = 2_000  # per rollout
MAX_TURNS = 200  # of a rollout
MAX_TEXT = 20_000  # characters per prompt or response

_SAMPLE = re.compile(rb', "sample": ')  # the keys before it are equal in all answers to one prompt
_KEYS = 2_000  # bytes at the start of a line that are searched for them
_BYTES_PER_TOKEN = 45  # in a line of rollouts.jsonl.gz: text, id, two log-probs


@dataclass(slots=True)
class RunData:
    """The content of a page. `notes` are sentences about what is missing, skipped or thinned."""

    facts: dict[str, Any] = field(default_factory=dict)
    config: str = ""
    steps: list[dict[str, float]] = field(default_factory=list)
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    rollouts_total: int = 0
    notes: list[str] = field(default_factory=list)
    failure: str = ""  # the traceback of a run that failed
    written: float | None = None  # when metrics.jsonl was last written, seconds since the epoch

    @property
    def names(self) -> list[str]:
        """Every metric name, sorted."""
        return sorted({name for step in self.steps for name in step} - {"step"})


def read_run(run_dir: Path) -> RunData:
    """Read everything that a report shows. Raises ConfigError if the folder is not a run folder."""
    if not run_dir.is_dir():
        raise ConfigError(f"no run folder {run_dir}")
    if not any((run_dir / name).is_file() for name in (METRICS_FILE, CONFIG_FILE, RUN_FILE)):
        raise ConfigError(f"{run_dir} is not a run folder: it has no {METRICS_FILE}, {CONFIG_FILE} or {RUN_FILE}")
    data = RunData()
    data.facts = _read_facts(run_dir / RUN_FILE, data.notes)
    data.config = _read_text(run_dir / CONFIG_FILE, data.notes)
    data.failure = _read_failure(run_dir)
    _read_steps(run_dir / METRICS_FILE, data)
    _read_rollouts(run_dir / ROLLOUTS_FILE, data)
    for other in sorted(run_dir.glob(f"*/{METRICS_FILE}")):
        data.notes.append(f"{other.parent.name}/ is a separate run with its own page: hone report {other.parent}")
    return data


def curves(data: RunData) -> tuple[list[list[int]], dict[str, dict[str, Any]]]:
    """The distinct step lists, and for each metric its list and its values; non-finite values are text."""
    axes: list[list[int]] = []
    places: dict[tuple[int, ...], int] = {}
    series: dict[str, dict[str, Any]] = {}
    for name in data.names:
        points = [(int(step["step"]), step[name]) for step in data.steps if name in step]
        kept = _thinned(points)
        axis = tuple(step for step, _ in kept)
        if axis not in places:
            places[axis] = len(axes)
            axes.append(list(axis))
        series[name] = {"axis": places[axis], "values": [_short(value) for _, value in kept]}
        if len(kept) < len(points):
            series[name]["of"] = len(points)
    return axes, series


def time_by_phase(data: RunData) -> dict[str, Any]:
    """The seconds of a step by phase, averaged over stretches of steps: at most `MAX_COLUMNS`.

    `steps`: the first step of each stretch; `bands`: phase -> mean seconds; `rest`: the mean seconds that no phase has.
    A phase that a step does not have took no time in it.
    """
    phases = step_phases(data.names)
    timed = [step for step in data.steps if math.isfinite(step.get("perf/step_s", math.nan))]
    if not phases or not timed:
        return {"steps": [], "bands": {}, "rest": []}
    columns = min(len(timed), MAX_COLUMNS)
    cuts = [round(i * len(timed) / columns) for i in range(columns + 1)]
    stretches = [timed[a:b] for a, b in pairwise(cuts)]
    bands = {name: [_mean(step.get(name, 0.0) for step in part) for part in stretches] for name in phases}
    whole = [_mean(step["perf/step_s"] for step in part) for part in stretches]
    rest = [max(total - sum(band[i] for band in bands.values()), 0.0) for i, total in enumerate(whole)]
    return {
        "steps": [int(part[0]["step"]) for part in stretches],
        "bands": {name: [_short(value) for value in band] for name, band in bands.items()},
        "rest": [_short(value) for value in rest],
    }


def _mean(values: Iterable[float]) -> float:
    finite = [max(value, 0.0) if math.isfinite(value) else 0.0 for value in values]
    return sum(finite) / len(finite)


def _thinned(points: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    if len(points) <= MAX_POINTS:
        return points
    stretches = MAX_POINTS // 2
    kept: dict[int, float] = {}
    for i in range(stretches):
        part = points[i * len(points) // stretches : (i + 1) * len(points) // stretches]
        finite = [point for point in part if math.isfinite(point[1])] or part
        kept.update([min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])])
        kept.update(point for point in part[:1] if not math.isfinite(point[1]))
    kept.update([points[0], points[-1]])
    return sorted(kept.items())


def _short(value: float, digits: int = 6) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return float(f"{value:.{digits}g}")


# ------------------------------------------------------------------------------------------------------- the files


def _read_facts(path: Path, notes: list[str]) -> dict[str, Any]:
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


def _read_failure(run_dir: Path) -> str:
    """The end of the traceback that a failed run leaves; empty if a run has begun in the folder since."""
    path, facts = run_dir / FAILURE_FILE, run_dir / RUN_FILE
    if not path.is_file() or (facts.is_file() and path.stat().st_mtime_ns < facts.stat().st_mtime_ns):
        return ""
    return path.read_text(encoding="utf-8", errors="replace")[-MAX_TEXT:]


def _read_text(path: Path, notes: list[str]) -> str:
    if not path.is_file():
        notes.append(f"There is no {path.name}, so the settings of the run are unknown.")
        return ""
    return path.read_text(encoding="utf-8", errors="replace")


def _read_steps(path: Path, data: RunData) -> None:
    if not path.is_file():
        data.notes.append(f"There is no {path.name}: no step was logged yet.")
        return
    data.written = path.stat().st_mtime
    broken = 0
    for line in whole_lines(path):
        record = _parse(line)
        if record is None:
            broken += 1
            continue
        numbers = {name: to_float(value) for name, value in record.items()}
        data.steps.append({name: number for name, number in numbers.items() if number is not None})
    if broken:
        data.notes.append(f"{broken} lines of {path.name} could not be read and were skipped.")
    bad = sum(not math.isfinite(value) for step in data.steps for value in step.values())
    if bad:
        data.notes.append(f"{bad} values are not finite (NaN or infinite); the charts mark them.")


def _read_rollouts(path: Path, data: RunData) -> None:
    if not path.is_file():
        data.notes.append(f"There is no {path.name}: this run wrote no rollouts.")
        return
    lines = _index(path, data.notes)
    data.rollouts_total = len(lines)
    wanted = sorted(line.number for line in _chosen(lines))
    broken = 0
    for text in _numbered(rollout_lines(path), wanted):
        record = _parse(text)
        if record is None:
            broken += 1
        else:
            data.rollouts.append(_row(record))
    if broken:
        data.notes.append(f"{broken} lines of {path.name} could not be read and were skipped.")
    if len(data.rollouts) + broken < len(lines):
        data.notes.append(
            f"This page has {len(data.rollouts):,} of {len(lines):,} rollouts: whole groups, spread evenly over the "
            f"steps; all of them are in {path.name}."
        )
    if full := [step for step in data.steps if step.get(LEFT_OUT)]:
        data.notes.append(
            f"{path.name} reached its limit (rollouts_max_mib of the tracker jsonl) in step {int(full[0]['step'])}: it "
            f"keeps the rollouts before, and {int(sum(step[LEFT_OUT] for step in full)):,} later ones are not in it."
        )


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


def _row(record: Mapping[str, Any]) -> dict[str, Any]:
    """A rollout as the page needs it: short keys, rounded log-probs, long texts shortened."""
    tokens = record.get("tokens") or []
    gap = record.get("logprob_gap")
    return {
        "step": record["step"],
        "set": record.get("set"),
        "id": f"{record.get('prompt_id', '')} #{record.get('sample', 0)} {record.get('role', '')}".rstrip(),
        "status": record.get("status", ""),
        "stop": record.get("stop_reason", ""),
        "reward": _number(record.get("reward")),
        "components": {str(k): _number(v) for k, v in (record.get("components") or {}).items()},
        "error": record.get("error", ""),
        "prompt": _cut(record.get("prompt", "")),
        "response": _cut(record.get("response", "")),
        "truth": _cut(_as_text(record.get("ground_truth"))),
        "length": record.get("response_length", len(tokens)),
        "versions": record.get("weight_versions") or [],
        "conversation": [_turn(turn) for turn in (record.get("conversation") or [])[:MAX_TURNS]],
        "tokens": tokens[:MAX_TOKENS],
        "logprobs": _digits(record.get("rollout_logprobs") or [], 4),
        "gap": None if gap is None else _digits(gap, 3),
        "hidden": max(len(tokens) - MAX_TOKENS, 0),
    }


def _turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    """A turn of a conversation, with long texts shortened."""
    calls = [
        {key: _cut(value) if isinstance(value, str) else value for key, value in call.items()}
        for call in turn.get("calls") or []
    ]
    said, read = (_cut(turn.get(key, "")) for key in ("said", "read"))
    return {"said": said, "read": read, "reward": _number(turn.get("reward")), "calls": calls}


def _digits(values: Sequence[Any], digits: int) -> list[float | str | None]:
    return [_number(value, digits) for value in values[:MAX_TOKENS]]


def _number(value: Any, digits: int = 6) -> float | str | None:
    number = to_float(value)
    return None if number is None else _short(number, digits)


def _cut(text: Any) -> str:
    text = str(text)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} ... ({len(text) - MAX_TEXT:,} more characters)"


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
