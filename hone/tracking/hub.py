"""The one door from a run to its trackers.

    trainer --log(step, values)--> Tracking --> jsonl         the record: a failure ends the run
            --rollouts, message-->          |-> console       shows; a failure switches it off
            --phase--------------->         `-> wandb, mlflow ... each on a thread of its own (see background)

A tracker that fails, or does not answer for `timeout_s`, is switched off: the run goes on, a message says so once,
and `perf/trackers_failed` counts it from the next step on. Only `jsonl` is different: it is the record that a resumed
run and the report are built on, so the run ends with one clear error instead of training on without it. When a run
starts from scratch, a tracker that does not start is an error as well: someone is there to read it; when a run
continues, it is switched off like any other.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from hone import __version__
from hone.config import Choice, ConfigError
from hone.registry import CannotLoad
from hone.tracking import TRACKERS
from hone.tracking.background import Background
from hone.tracking.base import RunInfo, Tracker, TrackingError
from hone.tracking.jsonl import JsonlTracker
from hone.tracking.rollouts import Decode, TokenTexts, TrainerLogprobs, places_to_keep, rollout_record
from hone.tracking.settings import TrackingConfig
from hone.types import TrajectoryGroup

RUN_FILE = "run.json"


class Tracking:
    """Fans out to the trackers that the run file names.

    `decode` turns token ids into text, for rollouts; a run without rollouts needs none. Constructing imports the
    trackers' libraries and raises ConfigError, saying what to install, if one is missing; `begin` starts them.
    """

    def __init__(self, config: TrackingConfig, run: RunInfo, decode: Decode | None = None) -> None:
        self._choices = config.trackers
        self._keep = None if config.rollouts_per_step == "all" else config.rollouts_per_step
        self._timeout_s = config.timeout_s
        self._run = run
        self._texts = TokenTexts(decode) if decode is not None else None
        self._trackers: dict[str, Tracker] = {}
        self._failed = 0
        self._last_step: int | None = None
        self._run_began = False
        self._closed = False
        try:
            self._classes = {choice.name: TRACKERS.get(choice.name) for choice in self._choices}
        except CannotLoad as error:
            raise ConfigError(f"tracking.trackers: {error}") from error

    def begin(self, step: int) -> None:
        """Start the trackers of a run that stands at `step`; 0: it starts, and writes step 0 (again).

        Records of later steps are cut off: the run will write them again. Raises TrackingError.
        """
        resumed_from = step if step > 0 else None
        self._run = replace(self._run, resumed_from=resumed_from)
        self._last_step = resumed_from
        for choice in sorted(self._choices, key=_starting_order):
            try:
                self._trackers[choice.name] = self._start(choice)
            except Exception as error:
                if resumed_from is None or self._classes[choice.name] is JsonlTracker:
                    raise TrackingError(_sentence(choice.name, error)) from error
                self._switch_off(choice.name, error)
        self._write_facts(None)
        self._run_began = True
        record = self._trackers.get("jsonl")
        if isinstance(record, JsonlTracker) and resumed_from is not None and record.last_step != resumed_from:
            self.message(
                f"{record.where} ends at step {record.last_step}, the run continues after step {resumed_from}: "
                "the steps between are missing from it"
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """All metrics of one step, evaluations included. Called once per step, before the step's checkpoint is saved.

        Raises TrackingError if the record cannot be written, ValueError for a step that was logged already.
        """
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"step {step} was logged after step {self._last_step}: one call per step, in order")
        figures = {name: float(value) for name, value in values.items()}
        if self._failed:
            figures["perf/trackers_failed"] = float(self._failed)
        for name in list(self._trackers):
            self._try(name, lambda tracker: tracker.log(step, figures))
        self._last_step = step

    def rollouts(
        self, step: int, groups: Sequence[TrajectoryGroup], trainer_logprobs: TrainerLogprobs | None = None
    ) -> None:
        """The training trajectories of a step, of which `rollouts_per_step` are written. Called before `log`.

        `trainer_logprobs` may cover any of them: (group, trajectory within it) -> one log-prob per token.
        """
        self._write_rollouts(step, None, groups, trainer_logprobs or {})

    def evaluated(self, step: int, name: str, groups: Sequence[TrajectoryGroup]) -> None:
        """The trajectories of an evaluation set, of which `rollouts_per_step` are written. Called before `log`."""
        self._write_rollouts(step, name, groups, {})

    def message(self, text: str) -> None:
        """One line for the person who watches; on standard error where no console tracker is at work."""
        if "console" not in self._trackers:
            sys.stderr.write(f"{text}\n")
        for name in list(self._trackers):
            self._try(name, lambda tracker: tracker.message(text))

    def phase(self, name: str) -> None:
        """What the run does now; a `Timer`'s `on_phase`."""
        for tracker in list(self._trackers):
            self._try(tracker, lambda one: one.phase(name))

    def flush(self) -> None:
        """Put the record on disk, proof against a power cut; before a checkpoint is made valid."""
        for name in list(self._trackers):
            self._try(name, lambda tracker: tracker.flush())

    def places(self) -> dict[str, str]:
        """Where each tracker's output is, for the end of a run."""
        return {name: tracker.where for name, tracker in self._trackers.items() if tracker.where}

    def close(self, outcome: str = "finished") -> None:
        """End every tracker, each within `timeout_s`; `outcome` is what the report says of the run."""
        if self._closed:
            return
        self._closed = True
        if self._run_began:
            self._write_facts(outcome)
        for name in sorted(self._trackers, key=lambda name: name == "console"):  # the console shows the others' ends
            self._try(name, lambda tracker: tracker.close())
        self._trackers.clear()

    def __enter__(self) -> Tracking:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(_outcome(error))

    # -------------------------------------------------------------------------------------------------- inside

    def _start(self, choice: Choice) -> Tracker:
        build: Callable[[], Tracker] = lambda: self._classes[choice.name](choice, self._run)  # noqa: E731
        if not getattr(self._classes[choice.name], "own_thread", True):
            return build()
        return Background(choice.name, build, self._timeout_s)

    def _try(self, name: str, call: Callable[[Tracker], None]) -> None:
        tracker = self._trackers.get(name)
        if tracker is None:
            return
        try:
            call(tracker)
        except Exception as error:
            if isinstance(tracker, JsonlTracker):
                raise
            self._switch_off(name, error)

    def _switch_off(self, name: str, error: Exception) -> None:
        self._trackers.pop(name, None)
        self._failed += 1
        self.message(f"{_sentence(name, error)}; it is switched off, the run goes on")

    def _write_rollouts(
        self, step: int, set_name: str | None, groups: Sequence[TrajectoryGroup], logprobs: TrainerLogprobs
    ) -> None:
        if self._texts is None:
            raise ValueError("rollouts were given to a Tracking that was built without `decode`")
        records = [
            {"step": step, "set": set_name, **rollout_record(groups[i], j, self._texts, logprobs.get((i, j)))}
            for i, j in places_to_keep(groups, self._keep)
        ]
        for name in list(self._trackers):
            self._try(name, lambda tracker: tracker.rollouts(step, records))

    def _write_facts(self, outcome: str | None) -> None:
        """`run.json`: what the report's header says of the run besides its settings."""
        path = self._run.run_dir / RUN_FILE
        now = datetime.now(UTC).isoformat(timespec="seconds")
        facts = {
            "name": self._run.name,
            "total_steps": self._run.total_steps,
            "started": _started_before(path) if self._run.resumed_from is not None else now,
            "resumed_from": self._run.resumed_from,
            "ended": None if outcome is None else now,
            "outcome": outcome,
            "trackers": self.places(),
            "hone": __version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".json.tmp")
            temporary.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
            os.replace(temporary, path)
        except OSError as error:
            self.message(f"cannot write {path}: {error.strerror or error}; the report will lack it")


def _starting_order(choice: Choice) -> int:
    """The record first, so that it has a step even if another tracker breaks on it; the live display last."""
    return {"jsonl": 0, "console": 2}.get(choice.name, 1)


def _sentence(name: str, error: Exception) -> str:
    if isinstance(error, TrackingError):
        return str(error)
    return f"tracker {name!r} failed: {type(error).__name__}: {' '.join(str(error).split())}"


def _outcome(error: BaseException | None) -> str:
    if error is None:
        return "finished"
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return "interrupted"
    return f"failed: {type(error).__name__}: {' '.join(str(error).split())}"


def _started_before(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("started")
    except (OSError, ValueError):
        return None
