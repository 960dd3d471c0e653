"""Evidence of a run: its metrics as curves, its settings, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from hone.composition import ConfigError, from_yaml
from hone.diagnosis.trends import RECENT, Curve, Point
from hone.tracking.facts import RUN_FILE
from hone.tracking.report.columns import Column, MetricsFile
from hone.tracking.report.rundata import CONFIG_FILE, read_facts, read_failure, require_run, unread_lines
from hone.tracking.trackers.jsonl import METRICS_FILE

FAILED = "failed: "
"""Beginning of the outcome of a run that failed (`run.json`)."""
Weight = Literal["stops", "hurts", "note"]
"""Weight of a finding: it ended the run, the run learns worse or slower, or it is worth knowing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or worth knowing."""

    weight: Weight
    title: str
    seen: str
    """Figures and steps."""
    meaning: str
    """The usual cause."""
    tries: tuple[str, ...]
    """Changes to try, the most likely first."""
    metrics: tuple[str, ...] = ()
    """Metrics to look at in the report."""


@dataclass(slots=True)
class Evidence:
    """Metrics, settings and failure of a run, read once."""

    folder: Path
    columns: Mapping[str, Column]
    settings: dict[str, Any]
    failure: str = ""
    steps: int = 0  # that were logged
    last_step: int = 0
    unread: tuple[str, ...] = ()  # sentences about files that could not be read, or not all of them
    vanished: bool = False  # it has begun and not ended, and no process writes it
    _curves: dict[str, Curve] = field(default_factory=dict)

    def curve(self, name: str) -> Curve:
        """Return the finite values of a metric, evaluation before training (step 0) included."""
        if name not in self._curves:
            column = self.columns.get(name)
            self._curves[name] = Curve(Point(*pair) for pair in column.finite()) if column else Curve()
        return self._curves[name]

    def names(self, prefix: str) -> list[str]:
        """Return the metrics whose names begin so, sorted."""
        return sorted(name for name in self.columns if name.startswith(prefix))

    @property
    def is_solved(self) -> bool:
        """Return whether nearly all recent answers were right: rewards are high, and near the highest.

        Below a highest reward of 1 it is False: full rewards of such a task look like rewards for a part of one.
        """
        mean, most = (self.curve(f"reward/{name}").last(RECENT) for name in ("mean", "max"))
        return bool(mean and most) and mean.level() > 0.8 * max(most.level(), 1.0)

    def setting(self, key: str, default: Any = None) -> Any:
        """Return a setting by its dotted key; the default if it is null or absent."""
        place: Any = self.settings
        for part in key.split("."):
            place = place.get(part) if isinstance(place, dict) else None
        return default if place is None else place


def read_evidence(folder: Path, is_written: bool = True) -> Evidence:
    """Read a run folder; `is_written`: the run may still go on. Raises ConfigError if it is none."""
    require_run(folder)
    metrics = MetricsFile(folder / METRICS_FILE)
    if (folder / METRICS_FILE).is_file():
        while metrics.read():
            pass
    columns = metrics.columns
    unread = unread_lines(folder / METRICS_FILE, columns)
    facts = read_facts(folder / RUN_FILE, unread if (folder / RUN_FILE).is_file() else [])
    outcome = str(facts.get("outcome") or "")
    told = outcome.removeprefix(FAILED) if outcome.startswith(FAILED) else ""  # a program that trains has the traceback
    failure = read_failure(folder) or told
    vanished = bool(facts) and not (outcome or failure or is_written)
    settings = read_settings(folder)
    return Evidence(
        folder, columns, settings, failure, columns.lines, columns.last_step, tuple(unread), vanished=vanished
    )


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings of a run; empty without a `config.yaml`. Raises ConfigError if that holds something else."""
    path = folder / CONFIG_FILE
    try:
        settings = from_yaml(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else {}
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict | None):
        raise ConfigError(f"{path} should hold the settings of a run as key: value, found {type(settings).__name__}")
    return settings or {}
