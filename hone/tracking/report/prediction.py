"""A run's prediction and what was measured, from its folder.

prediction.json   written at launch: memory by phase, seconds by phase, or why there is none
memory.json       peak memory by phase of the process that trains, by the tracker `memory`
peaks.json        peak memory of the rank that needs most, of each trained role
metrics.jsonl     seconds by phase
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from hone.tracking.report.columns import Columns
from hone.tracking.trackers.memory import MEMORY_FILE

PREDICTION_FILE = "prediction.json"
PEAKS_FILE = "peaks.json"
FILES = (PREDICTION_FILE, MEMORY_FILE, PEAKS_FILE)

WARM_UP = 2  # first steps, which compile and fill caches
PHASES = {  # of a prediction -> as a run calls them
    "load": ("load",),
    "generate": ("generate", "trainer_wait"),
    "forward": ("forward",),
    "backward": ("backward",),
    "sync": ("weight_sync",),
    "checkpoint": ("save_checkpoint",),
}
WITH = {"backward": "optimizer"}  # the optimizer's step is in a run's phase `backward`
_HEAD = (
    '<th title="a part of a step, or of the launch">phase</th>'
    '<th title="what hone plan computed at launch">predicted</th>'
    '<th title="peak of the memory, median of the seconds after the first steps">measured</th>'
    '<th title="1: right; above 1: the prediction was too high">predicted / measured</th>'
)
OUTSIDE = "other_work"  # a phase of a prediction that has no timer of its own
BASE = "before loading"  # the part of a prediction that the process has without a model


@dataclass(frozen=True, slots=True)
class Row:
    """One figure, as predicted and as measured; None: not known."""

    what: str
    predicted: float | None
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """Predicted over measured."""
        return None if not self.predicted or not self.measured else self.predicted / self.measured


@dataclass(frozen=True, slots=True)
class Prediction:
    """A prediction and its run. `why_not`: why there is none."""

    source: str = ""
    why_not: str = ""
    memory: tuple[Row, ...] = ()  # bytes
    seconds: tuple[Row, ...] = ()


def read_prediction(folder: Path, columns: Columns) -> Prediction | None:
    """The prediction of the run in `folder`; None if the folder has none."""
    if not (folder / PREDICTION_FILE).is_file():
        return None
    found = _read(folder / PREDICTION_FILE)
    if found.get("why_not"):
        return Prediction(why_not=str(found["why_not"]))
    peaks, phases = _read(folder / PEAKS_FILE), _read(folder / MEMORY_FILE)
    source = f"{found.get('device', '')}, by {found.get('costs_from', '')}"
    try:
        memory, seconds = tuple(_memory(found, phases, peaks)), tuple(_seconds(found, columns))
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # a file that somebody has changed
        return Prediction(why_not=f"{PREDICTION_FILE} or a file of its peaks is damaged ({error!r})")
    return Prediction(source, memory=memory, seconds=seconds)


def resident(folder: Path, phase: str) -> list[tuple[str, int]]:
    """Parts of the memory in a phase of a run as predicted, with bytes, the largest first; empty if that is not known.

    `phase` is the run's name of it. A phase that no forecast has is taken as the one that needs most.
    """
    found = _read(folder / PREDICTION_FILE)
    names = [name for name, ones in PHASES.items() if phase in ones]
    names += [WITH[name] for name in names if name in WITH]
    try:
        memory = found["memory"]
        here = [memory[name] for name in names if name in memory] or [memory[found["peak"]["phase"]]]
        parts = max(here, key=lambda one: one["bytes"])["parts"]
        sizes = [(f"{one['role']} {one['what']}", int(one["bytes"])) for one in parts]
    except (AttributeError, LookupError, TypeError, ValueError):  # no prediction, or a file that somebody has changed
        return []
    return sorted(sizes, key=lambda one: -one[1])


def _read(path: Path) -> dict[str, Any]:
    """The mapping in a file; empty if there is none, or a launch that was killed has left half of it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _memory(found: Mapping[str, Any], file: Mapping[str, Any], peaks: Mapping[str, Any]) -> Iterator[Row]:
    """Memory by phase, and the peak. On an accelerator without the device's context, which no allocator counts."""
    on_cpu = found.get("on_cpu", True)
    predicted = {name: one["bytes"] - (0 if on_cpu else _base(one)) for name, one in found["memory"].items()}
    measured = {} if found.get("ranks_apart") else file.get("phases", {})
    for name, names in PHASES.items():
        if name not in predicted:
            continue
        here = max(predicted[name], predicted.get(WITH.get(name, ""), 0))
        there = max((measured[one] for one in names if one in measured), default=None)
        yield Row(name, here, there)
    used, resident = max(measured.values(), default=None), max(peaks.get("roles", {}).values(), default=None)
    if on_cpu and used is not None:  # memory that was freed and is kept for the next array is no phase's
        yield Row("peak", max(predicted.values()), used)
        yield Row("peak with freed memory", None, resident)
    else:
        yield Row(
            "peak", max(predicted.values()), max([one for one in (used, resident) if one is not None], default=None)
        )


def _base(phase: Mapping[str, Any]) -> int:
    return sum(part["bytes"] for part in phase["parts"] if part["what"] == BASE)


def _seconds(found: Mapping[str, Any], columns: Columns) -> Iterator[Row]:
    """Seconds by phase: of a run the median of its steps."""
    for name, predicted in found["seconds"].items():
        measured = _outside_models(columns) if name == OUTSIDE else _median(columns, f"perf/{name}_s")
        if predicted or measured:
            yield Row(name, predicted, measured)
    yield Row("step", found["step_s"], _median(columns, "perf/step_s"))


def _outside_models(columns: Columns) -> float | None:
    """Seconds of a step outside its models: the driver's, which has the weight sync, too."""
    driver = _median(columns, "perf/driver_s")
    return None if driver is None else max(driver - (_median(columns, "perf/weight_sync_s") or 0.0), 0.0)


def _median(columns: Columns, name: str) -> float | None:
    column = columns.get(name)
    values = [value for step, value in column.finite() if step > 0] if column is not None else []
    return median(values[WARM_UP:] or values) if values else None


def prediction_section(prediction: Prediction | None) -> str:
    """Prediction and measurement as HTML; empty if there is no prediction."""
    if prediction is None:
        return ""
    if prediction.why_not:
        return f"<p>No prediction was made for this run: {escape(prediction.why_not)}</p>"
    rows = [*((row, 2**30, "GiB") for row in prediction.memory), *((row, 1, "s") for row in prediction.seconds)]
    lines = "".join(
        f"<tr><td>{escape(row.what.replace('_', ' '))}</td><td>{_figure(row.predicted, unit, name)}</td>"
        f"<td>{_figure(row.measured, unit, name)}</td><td>{_figure(row.ratio)}</td></tr>"
        for row, unit, name in rows
    )
    return (
        f'<details><summary><h2>Predicted and measured</h2><span class="count">{escape(prediction.source)}</span>'
        f"</summary><table><thead><tr>{_HEAD}</tr></thead><tbody>{lines}</tbody></table></details>"
    )


def _figure(value: float | None, unit: float = 1, name: str = "") -> str:
    return "" if value is None else f"{value / unit:.3g} {name}".strip()
