"""Run folders that are read as they grow.

A folder is read again when a file of it has another size or time: this also works on shared file systems, which tell
nobody about changes made by another machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from hone.config import ConfigError
from hone.tracking.base import FAILURE_FILE
from hone.tracking.facts import RUN_FILE
from hone.tracking.findings import FINDINGS_FILE, marks_of, read_findings
from hone.tracking.names import Headline
from hone.tracking.report.charts import Chart, charts, explained
from hone.tracking.report.columns import MetricsFile
from hone.tracking.report.head import duration, seconds_of, settings_of, shown_headlines, state_of
from hone.tracking.report.prediction import FILES as PREDICTION_FILES
from hone.tracking.report.prediction import read_prediction
from hone.tracking.report.rundata import (
    CONFIG_FILE,
    RunData,
    curves,
    limit_notes,
    metrics_notes,
    read_facts,
    read_failure,
    read_text,
    time_by_phase,
)
from hone.tracking.trackers.jsonl import METRICS_FILE, ROLLOUTS_FILE
from hone.tracking.watch.index import RolloutIndex

FILES = (METRICS_FILE, RUN_FILE, CONFIG_FILE, ROLLOUTS_FILE, FAILURE_FILE, FINDINGS_FILE, *PREDICTION_FILES)
NOT_COMPARED = ("run.dir",)  # settings that differ in all runs
MOST_RUNS = 100
_TURN_S = 0.002  # between two parts of a file: a lock is not fair, and requests wait for it


class LiveRun:
    """One run folder. `version` grows with each change that was read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.version = 0
        self.data = RunData()
        self.rollouts = RolloutIndex(folder / ROLLOUTS_FILE)
        self.settings: dict[str, Any] = {}
        self._metrics = MetricsFile(folder / METRICS_FILE)
        self._seen: tuple[object, ...] = ()
        self._curves: dict[tuple[str, int, int], dict[str, Any]] = {}  # (section, points, version) -> what was sent
        self._take_facts()

    def has_changed(self) -> bool:
        """Return whether a file of the folder was written since the last call."""
        before = self._seen
        self._seen = (
            *(_stamp(self.folder / name) for name in FILES),
            state_of(self.data)[0],
        )  # which time changes, too
        return self._seen != before

    def read(self) -> bool:
        """Read the next part of the metrics; returns whether there is more. After the last part the version changes."""
        path = self.folder / METRICS_FILE
        try:
            if path.is_file() and self._metrics.read():
                return True
            self._take_facts()
        except (OSError, ValueError, ArithmeticError) as error:  # of this run; the page shows the others
            self.data.notes.append(f"this folder cannot be read: {error}")
        self._curves.clear()
        self.version += 1
        return False

    def _take_facts(self) -> None:
        """Read the small files: what the run is, how it was set up, why it failed."""
        data = RunData(columns=self._metrics.columns, written=self._metrics.written)
        data.facts = read_facts(self.folder / RUN_FILE, data.notes)
        data.config = read_text(self.folder / CONFIG_FILE, data.notes)
        data.failure = read_failure(self.folder)
        data.marks = marks_of(read_findings(self.folder, data.notes))
        data.notes += metrics_notes(self.folder / METRICS_FILE, data.columns)
        data.notes += limit_notes(self.folder / ROLLOUTS_FILE, data.columns)
        data.prediction = read_prediction(self.folder, data.columns)
        if data.config != self.data.config:
            self.settings = settings_of(data.config)
        self.data = data

    def row(self, index: int, name: str) -> dict[str, Any]:
        """The run's line in the table of runs."""
        state, kind = state_of(self.data)
        total = self.data.facts.get("total_steps")
        return {
            "index": index,
            "name": name,
            "folder": str(self.folder),
            "version": self.version,
            "state": state,
            "kind": kind,
            "step": self.data.columns.last_step,
            "total": total if isinstance(total, int) else None,
            "time": duration(seconds_of(self.data)),
            "figures": [_figure(self.data, one) for one in shown_headlines(self.data)],
        }

    def curves(self, section: str, chosen: Sequence[Chart], points: int) -> dict[str, Any]:
        """The curves of a section's charts, thinned, and the marks on all charts; phases if a chart has them."""
        key = (section, points, self.version)
        if key not in self._curves:
            names = {name for chart in chosen for name in chart.series if name in self.data.columns}
            axes, series = curves(self.data, sorted(names), points)
            phases = time_by_phase(self.data) if any(chart.kind == "stack" for chart in chosen) else None
            self._curves[key] = {"axes": axes, "series": series, "phases": phases, "marks": self.data.marks}
        return self._curves[key]


@dataclass(slots=True)
class Told:
    """The state of the runs that one page has been sent."""

    versions: dict[int, int]
    names: int = 0
    differing: int = -1


class Watched:
    """All run folders of a page. `look` is called by one thread, the other methods by requests."""

    def __init__(self, places: Iterable[Path]) -> None:
        """Raises ConfigError for a place that is neither a run folder nor a folder with run folders."""
        self._places = [place.resolve() for place in places]
        self.runs: list[LiveRun] = []
        self.names: list[str] = []
        self.lock = Lock()
        self._charts: list[Chart] = []
        self._metrics: frozenset[str] = frozenset()
        self._charts_version = 1
        self._settings_version = 0
        for place in self._places:
            if not place.is_dir():
                raise ConfigError(f"no run folder {place}")
        self._find()
        if not self.runs:
            looked = ", ".join(map(str, self._places))
            raise ConfigError(
                f"{looked} is not a run folder: it has no {METRICS_FILE}, {CONFIG_FILE} or {RUN_FILE}, and no folder "
                "in it has one; name the run.dir of a run, or a folder with such folders"
            )

    def look(self) -> bool:
        """Read what has changed; returns whether anything has. New run folders of a watched folder join."""
        with self.lock:
            self._find()
            runs = list(self.runs)
        changed = [run for run in runs if run.has_changed()]
        for run in changed:
            more = True
            while more:
                with self.lock:
                    settings = run.settings
                    more = run.read()
                    self._settings_version += settings is not run.settings
                    names = self._metrics | run.data.columns.keys()
                    if names != self._metrics:
                        self._metrics, self._charts = names, charts(sorted(names))
                        self._charts_version += 1
                time.sleep(_TURN_S)
        return bool(changed)

    def news(self, told: Told) -> dict[str, Any]:
        """News that a page has not been sent yet; `told` is changed accordingly. Empty if there is nothing."""
        with self.lock:
            rows = [
                run.row(index, self.names[index])
                for index, run in enumerate(self.runs)
                if told.versions.get(index) != run.version
            ]
            news: dict[str, Any] = {"runs": rows} if rows else {}
            if rows and told.names != self._charts_version:
                news["charts"] = [chart.plain() for chart in self._charts]
            if rows and told.differing != self._settings_version + len(self.runs):
                news["differing"] = self._differing()
            if rows:
                told.versions |= {row["index"]: row["version"] for row in rows}
                told.names, told.differing = self._charts_version, self._settings_version + len(self.runs)
            return news

    def section(self, name: str) -> list[Chart]:
        """The charts of a section."""
        return [chart for chart in self._charts if chart.section == name]

    def _find(self) -> None:
        """Add run folders that have appeared."""
        known = {run.folder for run in self.runs}
        found = [folder for place in self._places for folder in run_folders(place) if folder not in known]
        room, found = MOST_RUNS - len(self.runs), list(dict.fromkeys(found))
        self.runs += [LiveRun(folder) for folder in found[len(found) - room if len(found) > room else 0 :]]
        if len(self.names) != len(self.runs):
            self.names = names_of([run.folder for run in self.runs])

    def _differing(self) -> list[tuple[str, list[str | None]]]:
        """Keys whose values differ between runs, and the value in each run; None where it is not set."""
        keys = sorted({key for run in self.runs for key in run.settings})
        rows = [(key, [_shown(run.settings.get(key)) for run in self.runs]) for key in keys if key not in NOT_COMPARED]
        return [(key, values) for key, values in rows if len(set(values)) > 1]


def is_run(folder: Path) -> bool:
    """Return whether a folder is one of a run."""
    return any((folder / name).is_file() for name in (METRICS_FILE, CONFIG_FILE, RUN_FILE))


def run_folders(place: Path) -> list[Path]:
    """The place itself if it is a run folder, else the run folders in it, the oldest first."""
    if is_run(place):
        return [place]
    try:
        inside = [folder for folder in place.iterdir() if folder.is_dir() and is_run(folder)]
        return sorted(inside, key=lambda folder: (folder.stat().st_ctime, folder.name))
    except OSError:  # it was removed meanwhile, or its file system does not answer
        return []


def names_of(folders: Sequence[Path]) -> list[str]:
    """Short names of folders: the last part of each path, with more parts where names would be equal.

    >>> names_of([Path("/a/x/run"), Path("/a/y/run"), Path("/a/other")])
    ['x/run', 'y/run', 'other']
    """
    names = []
    for folder in folders:
        parts = 1
        while any(other != folder and other.parts[-parts:] == folder.parts[-parts:] for other in folders):
            parts += 1
        names.append("/".join(folder.parts[-parts:]))
    return names


def _figure(data: RunData, headline: Headline) -> dict[str, str]:
    """A headline of a run: its last finite value, and its best one with its step."""
    points = data.columns[headline.metric].finite()
    if not points:
        return {"title": headline.title, "about": explained(headline.metric), "last": "not finite", "best": ""}
    best = ""
    if headline.better:
        sign = 1 if headline.better == "higher" else -1
        step, value = max(points, key=lambda point: sign * point[1])
        best = f"best: {headline.show(value)} at step {step:,}"
    last = headline.show(points[-1][1])
    return {"title": headline.title, "about": explained(headline.metric), "last": last, "best": best}


def _shown(value: Any) -> str | None:
    if value is None:
        return None
    return f"{value:g}" if isinstance(value, float) and math.isfinite(value) else str(value)


def _stamp(path: Path) -> object:
    """Something that differs after a file was written."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino
