"""What a tracker is: the seam between a run and the places that keep or show its numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

RolloutRecord = Mapping[str, Any]
"""One line of `rollouts.jsonl`; `hone.tracking.rollouts.rollout_record` says what is in it."""


class TrackingError(RuntimeError):
    """A tracker that cannot do its work, in one sentence for a person."""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What trackers may know of a run.

    RunInfo(run_dir=Path("runs/sort"), total_steps=200, resumed_from=40, config={"seed": 0, ...})
    """

    run_dir: Path
    total_steps: int | None = None  # None: unknown; no time left is shown
    resumed_from: int | None = None  # step of the checkpoint this run continues from; None: it starts from scratch
    config: Mapping[str, Any] = field(default_factory=dict)  # the resolved settings, as `hone.config.plain` gives them

    @property
    def name(self) -> str:
        return self.run_dir.resolve().name


class Tracker:
    """One place for metrics. A subclass overrides what it can use; the rest is ignored.

    It is constructed as `Tracker(settings, run)` and must be ready to log after that, or raise. Any call may raise:
    the hub decides what a failure means (see `hone.tracking.hub`).
    """

    own_thread: ClassVar[bool] = True  # False only for what is quick and cannot block: the library's own two
    where: str = ""  # for people: a path or an address at which this tracker's output is found

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """All metrics of one step, once; steps strictly increase, except that a resumed run repeats some."""

    def rollouts(self, step: int, records: Sequence[RolloutRecord]) -> None:
        """Some of the step's trajectories, before the step's `log`."""

    def message(self, text: str) -> None:
        """One line for the person who watches the run."""

    def phase(self, name: str) -> None:
        """What the run is doing now: `generate`, `forward` ...; empty between steps."""

    def flush(self) -> None:
        """Put everything logged so far on disk, where that means something."""

    def close(self) -> None:
        """No call follows."""


def known_id(run: RunInfo, tracker: str) -> str | None:
    """The id under which a tracker's service knows this run, if the run is continued; None for a new one."""
    path = _id_file(run, tracker)
    return path.read_text(encoding="utf-8").strip() if run.resumed_from is not None and path.is_file() else None


def keep_id(run: RunInfo, tracker: str, value: str) -> str:
    """Remember the id of a new run, for when it is continued; returns it."""
    path = _id_file(run, tracker)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{value}\n", encoding="utf-8")
    return value


def _id_file(run: RunInfo, tracker: str) -> Path:
    return run.run_dir / "tracking" / f"{tracker}.id"


def flat_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted keys with scalar values (lists as text), for trackers that want them flat.

    >>> flat_config({"a": {"b": 1}, "c": [1, 2]})
    {'a.b': 1, 'c': '[1, 2]'}
    """
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat.update(flat_config(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, str | int | float | bool | None) else str(value)
    return flat


def plain_name(name: str) -> str:
    """A metric name in the characters every tracker takes: `eval/sort/mean@4` becomes `eval/sort/mean_4`."""
    return re.sub(r"[^A-Za-z0-9_\-. /]", "_", name)
