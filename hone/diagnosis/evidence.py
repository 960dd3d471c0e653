"""Evidence of a run: its metrics as curves, its settings, and how it ended."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from hone.composition import ConfigError, from_yaml
from hone.diagnosis.trends import Curve, Point
from hone.tracking.report.rundata import read_run

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
    """Files of a run folder, read once."""

    folder: Path
    steps: list[dict[str, float]]
    settings: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)
    failure: str = ""

    def curve(self, name: str) -> Curve:
        """Return the finite values of a metric, evaluation before training (step 0) included."""
        return Curve(
            Point(int(step["step"]), step[name]) for step in self.steps if name in step and math.isfinite(step[name])
        )

    def names(self, prefix: str) -> list[str]:
        """Return the metrics whose names begin so, sorted."""
        return sorted({name for step in self.steps for name in step if name.startswith(prefix)})

    def setting(self, key: str, default: Any = None) -> Any:
        """Return a setting by its dotted key; the default if it is null or absent."""
        place: Any = self.settings
        for part in key.split("."):
            place = place.get(part) if isinstance(place, dict) else None
        return default if place is None else place


def read_evidence(folder: Path) -> Evidence:
    """Read a run folder; the run may still go on. Raises ConfigError if it is none."""
    data = read_run(folder)
    try:
        settings = from_yaml(data.config) if data.config else {}
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{folder / 'config.yaml'} is not valid YAML: {' '.join(str(error).split())}") from error
    return Evidence(folder, data.steps, settings if isinstance(settings, dict) else {}, data.facts, data.failure)
