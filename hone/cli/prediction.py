"""`hone plan RUN_FOLDER`: the prediction of a launched run, and what was measured."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from hone.cli.errors import say
from hone.config import ConfigError
from hone.tracking.report.columns import MetricsFile
from hone.tracking.report.prediction import PREDICTION_FILE, Prediction, Row, read_prediction
from hone.tracking.report.rundata import unread_lines
from hone.tracking.trackers.jsonl import METRICS_FILE

GIB = 2**30


def show_held(folder: Path, as_json: bool) -> None:
    """Print prediction and measurement of the run in `folder`. Raises ConfigError if it has no prediction."""
    metrics = MetricsFile(folder / METRICS_FILE)
    while (folder / METRICS_FILE).is_file() and metrics.read():
        pass
    for sentence in unread_lines(folder / METRICS_FILE, metrics.columns):
        say(f"warning: {folder}: {sentence}")
    found = read_prediction(folder, metrics.columns)
    if found is None:
        raise ConfigError(f"{folder} has no {PREDICTION_FILE}: name a run file, or a run folder that hone has begun")
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
        return
    if found.why_not:
        typer.echo(f"no prediction was made when this run was launched: {found.why_not}")
        return
    Console(highlight=False).print(held_table(found))


def held_table(found: Prediction) -> Table:
    """Memory in GiB and seconds of each phase: predicted, measured, and the first over the second."""
    shown = Table(title=f"Prediction at launch ({found.source})", title_justify="left", title_style="bold")
    for name in ("phase", "predicted", "measured", "predicted / measured"):
        shown.add_column(name, justify="left" if name == "phase" else "right")
    for row in found.memory:
        shown.add_row(*_cells(row, GIB, "GiB"))
    shown.add_section()
    for row in found.seconds:
        shown.add_row(*_cells(row, 1, "s"))
    return shown


def _cells(row: Row, unit: float, name: str) -> list[str]:
    figures = ["" if value is None else f"{value / unit:.3g} {name}" for value in (row.predicted, row.measured)]
    return [row.what.replace("_", " "), *figures, "" if row.ratio is None else f"{row.ratio:.2f}"]


__all__ = ["held_table", "show_held"]
