"""Reads a run folder for its report: whatever of it exists, at whatever moment, in an amount that a page can hold."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hone.config import ConfigError
from hone.tracking.jsonl import METRICS_FILE, ROLLOUTS_FILE, to_float, whole_lines
from hone.tracking.rollouts import spread

CONFIG_FILE = "config.yaml"
RUN_FILE = "run.json"

MAX_POINTS = 2_000  # of one curve; more are thinned to the least and greatest of each stretch
MAX_ROWS = 3_000  # rollouts on the page
MAX_BYTES = 10_000_000  # of them together
MAX_TOKENS = 2_000  # of one rollout
MAX_TEXT = 20_000  # characters of one prompt or response

_STEP = re.compile(rb'\{"step": (-?\d+)[,}]')
_BYTES_PER_TOKEN = 45  # of a line of rollouts.jsonl: text, id, two log-probs


@dataclass(slots=True)
class RunData:
    """What a page shows. `notes` says, in sentences, what is missing, was skipped or was thinned."""

    facts: dict[str, Any] = field(default_factory=dict)
    config: str = ""
    steps: list[dict[str, float]] = field(default_factory=list)
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    rollouts_total: int = 0
    notes: list[str] = field(default_factory=list)
    written: float | None = None  # when metrics.jsonl was last written, seconds since the epoch

    @property
    def names(self) -> list[str]:
        """Every metric name, sorted."""
        return sorted({name for step in self.steps for name in step} - {"step"})


def read_run(run_dir: Path) -> RunData:
    """Everything of a run that a report shows. Raises ConfigError if the folder is not that of a run."""
    if not run_dir.is_dir():
        raise ConfigError(f"no run folder {run_dir}")
    if not any((run_dir / name).is_file() for name in (METRICS_FILE, CONFIG_FILE, RUN_FILE)):
        raise ConfigError(f"{run_dir} is not a run folder: it has no {METRICS_FILE}, {CONFIG_FILE} or {RUN_FILE}")
    data = RunData()
    data.facts = _read_facts(run_dir / RUN_FILE, data.notes)
    data.config = _read_text(run_dir / CONFIG_FILE, data.notes)
    _read_steps(run_dir / METRICS_FILE, data)
    _read_rollouts(run_dir / ROLLOUTS_FILE, data)
    for other in sorted(run_dir.glob(f"*/{METRICS_FILE}")):
        data.notes.append(f"{other.parent.name}/ is a run of its own, with a page of its own (hone report).")
    return data


def curves(data: RunData) -> tuple[list[list[int]], dict[str, dict[str, Any]]]:
    """Step lists, and for each metric which of them it uses and its values; values that are not finite are text."""
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
        notes.append(f"There is no {path.name}: when the run started and how it ended is not known.")
        return {}
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        notes.append(f"{path.name} is not a JSON object and was left out.")
        return {}
    return facts


def _read_text(path: Path, notes: list[str]) -> str:
    if not path.is_file():
        notes.append(f"There is no {path.name}: the run's settings are not known.")
        return ""
    return path.read_text(encoding="utf-8", errors="replace")


def _read_steps(path: Path, data: RunData) -> None:
    if not path.is_file():
        data.notes.append(f"There is no {path.name}: no step has been logged yet.")
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
        data.notes.append(f"Lines of {path.name} that could not be read and were left out: {broken}.")
    bad = sum(not math.isfinite(value) for step in data.steps for value in step.values())
    if bad:
        data.notes.append(f"Not finite (NaN or infinite), and marked in their charts: {bad} of the values.")


def _read_rollouts(path: Path, data: RunData) -> None:
    if not path.is_file():
        data.notes.append(f"There is no {path.name}: this run wrote no rollouts.")
        return
    lines = _index(path)
    data.rollouts_total = len(lines)
    broken = 0
    with path.open("rb") as file:
        for offset, length, _ in _chosen(lines):
            file.seek(offset)
            record = _parse(file.read(length))
            if record is None:
                broken += 1
            else:
                data.rollouts.append(_row(record))
    if broken:
        data.notes.append(f"Lines of {path.name} that could not be read and were left out: {broken}.")
    if len(data.rollouts) + broken < len(lines):
        data.notes.append(
            f"{len(data.rollouts):,} of {len(lines):,} rollouts are on this page, spread evenly over the steps; "
            f"all of them are in {path.name}."
        )


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


_Line = tuple[int, int, int]
"""Offset, length and step of a line."""


def _index(path: Path) -> list[_Line]:
    lines: list[_Line] = []
    offset, step = 0, 0
    for line in whole_lines(path):
        found = _STEP.match(line)
        step = int(found[1]) if found else step  # another writer's order of keys: it belongs near its neighbours
        lines.append((offset, len(line), step))
        offset += len(line)
    return lines


def _chosen(lines: Sequence[_Line]) -> list[_Line]:
    """As many lines as the page can hold, every step with as many as any other as far as it has them."""
    by_step: dict[int, list[_Line]] = {}
    for line in lines:
        by_step.setdefault(line[2], []).append(line)
    rows = min(MAX_ROWS, len(lines))
    while rows > 1:
        chosen = _spread_over(by_step, rows)
        size = sum(min(length, MAX_TOKENS * _BYTES_PER_TOKEN) for _, length, _ in chosen)
        if size <= MAX_BYTES:
            return chosen
        rows = min(rows - 1, int(rows * MAX_BYTES / size))
    return list(lines[-1:])


def _spread_over(by_step: Mapping[int, Sequence[_Line]], rows: int) -> list[_Line]:
    every = list(by_step)
    steps = [every[position] for position in spread(len(every), rows)]
    quota = dict.fromkeys(steps, 0)
    left = rows
    while left > 0:  # deal one row to each step in turn until rows or lines run out
        open_steps = [step for step in steps if quota[step] < len(by_step[step])]
        if not open_steps:
            break
        each = max(1, left // len(open_steps))
        for step in open_steps:
            more = min(each, left, len(by_step[step]) - quota[step])
            quota[step] += more
            left -= more
    return [by_step[step][position] for step in steps for position in spread(len(by_step[step]), quota[step])]


def _row(record: Mapping[str, Any]) -> dict[str, Any]:
    """A rollout as the page has it: short keys, log-probs to the digits that can be read, long texts cut."""
    tokens = record.get("tokens") or []
    gap = record.get("logprob_gap")
    return {
        "step": record["step"],
        "set": record.get("set"),
        "id": f"{record.get('prompt_id', '')} #{record.get('sample', 0)}",
        "status": record.get("status", ""),
        "stop": record.get("stop_reason", ""),
        "reward": to_float(record.get("reward")),
        "components": {str(k): to_float(v) for k, v in (record.get("components") or {}).items()},
        "error": record.get("error", ""),
        "prompt": _cut(record.get("prompt", "")),
        "response": _cut(record.get("response", "")),
        "truth": _cut(_as_text(record.get("ground_truth"))),
        "length": record.get("response_length", len(tokens)),
        "versions": record.get("weight_versions") or [],
        "tokens": tokens[:MAX_TOKENS],
        "logprobs": _digits(record.get("rollout_logprobs") or [], 4),
        "gap": None if gap is None else _digits(gap, 3),
        "hidden": max(len(tokens) - MAX_TOKENS, 0),
    }


def _digits(values: Sequence[Any], digits: int) -> list[float | str | None]:
    numbers = [to_float(value) for value in values[:MAX_TOKENS]]
    return [None if number is None else _short(number, digits) for number in numbers]


def _cut(text: Any) -> str:
    text = str(text)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} ... ({len(text) - MAX_TEXT:,} characters more)"


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
