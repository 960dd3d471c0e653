"""Send a run's metrics, rollouts and messages to its trackers.

    trainer --log(step, values)--> Tracking --> jsonl         the record: a failure ends the run
            --rollouts, message-->          |-> console       live display: a failure switches it off
            --phase--------------->         `-> wandb, mlflow ... each in its own thread (see trackers/background)

A tracker that fails, or does not answer for its `timeout_s`, is switched off: the run continues, one message reports
it, and `perf/trackers_failed` counts it from the next step on. `jsonl` is different: resuming and the report need its
files, so if it fails the run ends with an error. A tracker that does not start ends a new run, because the user is
still there to read the error; in a resumed run it is switched off like any other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType

from hone.config import Choice, ConfigError, count_as_read
from hone.registry import CannotLoad
from hone.tracking import TRACKERS
from hone.tracking.base import (
    DRIVER,
    FINISHED,
    INTERRUPTED,
    Interrupted,
    RunInfo,
    Tracker,
    TrackingError,
    note,
    printable,
)
from hone.tracking.facts import RUN_FILE, STOPPED, write_facts
from hone.tracking.rollouts import NONE, ByPlace, Decode, TokenTexts, places_to_keep, rollout_record
from hone.tracking.settings import JsonlSettings, TrackerSettings, TrackingConfig
from hone.tracking.trackers.background import Background
from hone.tracking.trackers.jsonl import LEFT_OUT, JsonlTracker
from hone.types import TrajectoryGroup


class Tracking:
    """Passes each call to all trackers of the run file.

    `decode` turns token ids into text; only a run that writes rollouts needs it. The constructor imports the trackers'
    libraries and raises ConfigError, which says what to install, if one is missing. `begin` starts the trackers.
    """

    def __init__(self, config: TrackingConfig, run: RunInfo, decode: Decode | None = None) -> None:
        self._config = config
        self._choices = config.trackers
        self._run = run
        self._texts = TokenTexts(decode) if decode is not None else None
        self._trackers: dict[str, Tracker] = {}
        self._failed = 0
        self._left_out = 0  # rollouts of this step, because of the record's limit
        self._said_left_out = False
        self._last_step: int | None = None
        self._started: str | None = None  # when the run's first launch began
        self._run_began = False
        self._closed = False
        for choice in self._choices:  # a tracker reads its settings when it starts, in `begin`
            if decode is not None or not isinstance(choice, JsonlSettings):  # whose limit is of rollouts
                count_as_read(choice)
        try:
            self._classes = {choice.name: TRACKERS.get(choice.name) for choice in self._choices}
        except CannotLoad as error:
            raise ConfigError(f"tracking.trackers: {error}") from error

    def begin(self, step: int) -> None:
        """Start the trackers of a run that resumes after `step`; 0 is a new run, which logs step 0 itself.

        Removes the records of later steps, which the run writes again. Raises TrackingError.
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
                f"{record.where} ends at step {record.last_step}, but the run resumes after step {resumed_from}: "
                "it lacks the steps in between"
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write all metrics of one step, with its evaluations. Called once per step, before the checkpoint is saved.

        Raises TrackingError if the record cannot be written, ValueError if the step was already logged.
        """
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"step {step} was logged after step {self._last_step}; log each step once, in order")
        figures = {name: float(value) for name, value in values.items()}
        if self._failed:
            figures["perf/trackers_failed"] = float(self._failed)
        if self._left_out:
            figures["perf/rollouts_left_out"] = float(self._left_out)
            self._left_out = 0
        for name in list(self._trackers):
            self._try(name, lambda tracker: tracker.log(step, dict(figures)))  # a copy, which it may change
        self._last_step = step

    def rollouts(self, step: int, groups: Sequence[TrajectoryGroup], of_trainer: ByPlace | None = None) -> None:
        """Write `rollouts_per_step` of a step's training trajectories, before `log`; `of_trainer` may lack some."""
        self._write_rollouts(step, None, groups, of_trainer or {})

    def evaluated(self, step: int, name: str, groups: Sequence[TrajectoryGroup]) -> None:
        """Write `rollouts_per_step` of an evaluation set, of the same prompts each time. Called before `log`."""
        self._write_rollouts(step, name, groups, {})

    def message(self, text: str) -> None:
        """Show one line to the user; without a console tracker, print it to stderr."""
        text = printable(text)
        if "console" not in self._trackers:
            with suppress(OSError, RuntimeError):  # nobody reads it any more; a signal came while it was written to
                sys.stderr.write(f"{text}\n")
                sys.stderr.flush()
        for name in list(self._trackers):
            self._try(name, lambda tracker: tracker.message(text))

    def phase(self, name: str) -> None:
        """Show the current phase; used as a `Timer`'s `on_phase`."""
        note(DRIVER, name)
        for tracker in list(self._trackers):
            self._try(tracker, lambda one: one.phase(name))

    def flush(self) -> None:
        """Write the record to disk (fsync), and have the others write. Called before a checkpoint becomes valid."""
        for name in list(self._trackers):
            self._try(name, lambda tracker: tracker.flush())

    def places(self) -> dict[str, str]:
        """Return the output of each tracker: name -> path or address."""
        return {name: str(tracker.where) for name, tracker in self._trackers.items() if tracker.where}

    def close(self, outcome: str = FINISHED) -> None:
        """Close every tracker, each within its `timeout_s`. The report and the trackers show `outcome`."""
        if self._closed:
            return
        self._closed = True
        if self._run_began:
            self._write_facts(outcome)
        last = "console"  # it shows how closing the others went
        for name in sorted(self._trackers, key=lambda name: name == last):
            self._try(name, lambda tracker: tracker.close(outcome))
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
        settings = choice if isinstance(choice, TrackerSettings) else TrackerSettings(name=choice.name)
        return Background(choice.name, build, settings.timeout_s)

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
        tracker = self._trackers.pop(name, None)
        self._failed += 1
        self.message(f"{_sentence(name, error)}; it is switched off, and the run continues")
        if tracker is not None and not tracker.own_thread:  # others close themselves, in their thread
            with suppress(Exception):
                tracker.close()

    def _write_rollouts(self, step: int, place: str | None, groups: Sequence[TrajectoryGroup], known: ByPlace) -> None:
        if self._texts is None:
            raise ValueError("cannot write rollouts: this Tracking was built without `decode`")
        keep = self._config.rollouts_per_step  # read here: a run without rollouts has no use for it
        records = [
            {"step": step, "set": place, **rollout_record(groups[i], j, self._texts, known.get((i, j), NONE))}
            for i, j in places_to_keep(groups, None if keep == "all" else keep, step if place is None else 0)
        ]
        for name in list(self._trackers):
            self._try(name, lambda tracker: tracker.rollouts(step, records))
        record = self._trackers.get("jsonl")
        if isinstance(record, JsonlTracker) and record.left_out:
            self._left_out += len(records)
            if not self._said_left_out:
                self._said_left_out = True
                self.message(
                    f"warning: {record.left_out}: it keeps what it has, and rollouts from step {step} on are left out "
                    f"unless they still fit; metrics are written as before, with {LEFT_OUT}"
                )

    def _write_facts(self, outcome: str | None) -> None:
        try:
            self._started = write_facts(self._run, self._started, outcome, self.places())
        except OSError as error:
            self.message(f"cannot write {RUN_FILE}: {error.strerror or error}; the report will lack its facts")


def _starting_order(choice: Choice) -> int:
    """The record first, so that it has a step even if another tracker fails on it; the live display last."""
    return {"jsonl": 0, "console": 2}.get(choice.name, 1)


def _sentence(name: str, error: Exception) -> str:
    if isinstance(error, TrackingError):
        return str(error)
    return f"tracker {name!r} failed: {type(error).__name__}: {' '.join(str(error).split())}"


def _outcome(error: BaseException | None) -> str:
    if error is None:
        return FINISHED
    if isinstance(error, Interrupted | KeyboardInterrupt) or (isinstance(error, SystemExit) and error.code in STOPPED):
        return INTERRUPTED
    return f"failed: {type(error).__name__}: {' '.join(str(error).split())}"
