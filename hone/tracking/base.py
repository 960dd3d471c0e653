"""The interface of a tracker: a destination for a run's metrics and rollouts."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, ParamSpec, TypeVar

FINISHED, INTERRUPTED = "finished", "interrupted"
FAILURE_FILE = "failure.txt"  # in the run folder of a run that failed: the traceback

RolloutRecord = Mapping[str, Any]
"""One line of `rollouts.jsonl.gz`; `hone.tracking.rollouts.rollout_record` documents its keys."""


class Interrupted(Exception):
    """The run stopped after a signal, and everything up to `step` is saved."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped after step {step}, which is saved")
        self.step = step


class TrackingError(RuntimeError):
    """A tracker failed. The message is one sentence."""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The facts about a run that trackers get.

    RunInfo(run_dir=Path("runs/sort"), total_steps=200, resumed_from=40, config={"seed": 0, ...})
    """

    run_dir: Path
    total_steps: int | None = None  # None: unknown, so no remaining time is shown
    resumed_from: int | None = None  # step of the checkpoint that this run resumes from; None: a new run
    config: Mapping[str, Any] = field(default_factory=dict)  # the resolved settings, as `hone.config.plain` gives them

    @property
    def name(self) -> str:
        return self.run_dir.resolve().name


class Tracker:
    """One destination for metrics. A subclass overrides the methods that it needs; the others do nothing.

    `Tracker(settings, run)` must return ready to log, or raise. Any method may raise; `hone.tracking.hub` handles the
    failure.
    """

    own_thread: ClassVar[bool] = True  # False only for trackers that never block: `console` and `jsonl`
    where: str = ""  # path or address of this tracker's output, for display

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write all metrics of one step. Steps increase; a resumed run begins at `resumed_from` + 1, perhaps again."""

    def rollouts(self, step: int, records: Sequence[RolloutRecord]) -> None:
        """Write some of the step's trajectories. Called before the step's `log`."""

    def message(self, text: str) -> None:
        """Show one line to the person who watches the run."""

    def phase(self, name: str) -> None:
        """Show the current phase: `generate`, `forward` ...; empty between steps."""

    def flush(self) -> None:
        """Write everything logged so far out of this process, then return: a continued run does not log it again."""

    def close(self, outcome: str = FINISHED) -> None:
        """Finish; no call follows. `outcome`: how the run ended: FINISHED, INTERRUPTED, or "failed: <error>"."""


def known_id(run: RunInfo, tracker: str) -> str | None:
    """The run's id at a tracker's service, if the run is resumed; None for a new run."""
    path = _id_file(run, tracker)
    return path.read_text(encoding="utf-8").strip() if run.resumed_from is not None and path.is_file() else None


def keep_id(run: RunInfo, tracker: str, value: str) -> str:
    """Store the id of a new run, for when it is resumed; return it."""
    path = _id_file(run, tracker)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{value}\n", encoding="utf-8")
    return value


def _id_file(run: RunInfo, tracker: str) -> Path:
    return run.run_dir / "tracking" / f"{tracker}.id"


def flat_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to dotted keys with scalar values; lists become text.

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
    """Replace characters that some tracker rejects: `eval/sort/mean@4` becomes `eval/sort/mean_4`."""
    return re.sub(r"[^A-Za-z0-9_\-. /]", "_", name)


def printable(text: str) -> str:
    """Text that every terminal and file takes: half a character, which foreign errors may have, becomes its escape.

    >>> printable("bad \\ud800")
    'bad \\\\ud800'
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


DRIVER = "driver"
LISTENERS: list[Callable[[str, str, float], None]] = []  # of this process: called with a lane, what it does, the time
P = ParamSpec("P")
R = TypeVar("R")


def note(lane: str, doing: str) -> None:
    """A lane begins something and ends what it did before; empty: it waits. From any thread; see `activity`."""
    for listener in LISTENERS:
        listener(lane, doing, time.time())


def during(lane: str, doing: str, work: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
    """Call `work` while a lane does something; it waits afterwards."""
    note(lane, doing)
    try:
        return work(*arguments, **options)
    finally:
        note(lane, "")
