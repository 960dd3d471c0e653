"""The contract of a tracker: it takes every metric of every step, also of a run that is resumed."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hone.testing.contract import Absent, Contract, require
from hone.tracking.base import FINISHED, INTERRUPTED, RunInfo, Tracker

CONFIG = {"run": {"seed": 3}, "lists": [1, 2], "none": None}
RECORD: Mapping[str, Any] = {
    "step": 1,
    "set": "held_out",
    "prompt_id": "set/1",
    "question": "a | b",
    "prompt": "user: a | b",
    "status": "complete",
    "response": "naïve ☃\x00",
    "reward": math.nan,
    "token_ids": [1, 2],
    "components": {"exact_match": 1.0},
}
Record = Iterable[tuple[int, Mapping[str, float]]] | Mapping[int, Mapping[str, float]]


class TrackerContract(Contract):
    """Contract of `hone.tracking.base.Tracker`."""

    def make(self, run: RunInfo) -> Tracker:
        """Return a tracker of this run that is ready to log."""
        raise NotImplementedError

    def read(self, folder: Path) -> Record:
        """Return what the tracker holds of the run in this folder, in its order. Without it, not checked.

        Pairs of a step and its values, or of a step and some of them: [(0, {"reward/mean": 0.5}), ...]. A service that
        cannot hold a step twice may return a mapping: {0: {"reward/mean": 0.5}, ...}.
        """
        raise Absent("the suite cannot read back what the tracker wrote (`read`)")

    def test_every_metric_of_every_step_is_there(self) -> None:
        """Steps and values come back as they were logged, NaN and names with `@` and `/` included."""
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder, "run")
            self._log(RunInfo(run, total_steps=3, config=CONFIG), range(4))
            self._compare(self.read(run), {step: _values(step) for step in range(4)})

    def test_a_resumed_run_continues_its_record(self) -> None:
        """A run that resumes from step 2 logs step 3 again; the record then has each step once."""
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder, "run")
            self._log(RunInfo(run, config=CONFIG), range(4), "failed: ConnectionError: lost")
            self._log(RunInfo(run, resumed_from=2, config=CONFIG), range(3, 6))
            self._compare(self.read(run), {step: _values(step) for step in range(6)})

    def test_a_killed_run_keeps_what_was_flushed(self) -> None:
        """Steps logged before `flush` can be read although nobody called `close`, because nobody logs them again."""
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder, "run")
            tracker = self.make(RunInfo(run, config=CONFIG))
            try:
                for step in range(3):
                    tracker.log(step, _values(step))
                tracker.flush()
                self._compare(self.read(run), {step: _values(step) for step in range(3)})
            finally:
                tracker.close(INTERRUPTED)

    def test_everything_a_run_sends_is_taken(self) -> None:
        """Rollouts, messages, phases and flushes do not raise, nor does a run that logs nothing."""
        with tempfile.TemporaryDirectory() as folder:
            for outcome in (FINISHED, INTERRUPTED, "failed: ValueError: bad\nin two lines"):
                tracker = self.make(RunInfo(Path(folder, outcome[:4]), config=CONFIG))
                tracker.phase("generate")
                tracker.message("naïve ☃ [bold]no markup[/bold] " + "x" * 5000)
                if outcome != INTERRUPTED:
                    tracker.rollouts(1, [RECORD])
                    tracker.log(1, _values(1))
                tracker.phase("")
                tracker.flush()
                tracker.close(outcome)

    def test_a_tracker_says_where_it_writes(self) -> None:
        """`where` is text: a path, an address, or empty for a tracker that keeps nothing."""
        with tempfile.TemporaryDirectory() as folder:
            tracker = self.make(RunInfo(Path(folder, "run"), config=CONFIG))
            where: Any = tracker.where
            tracker.close()
            require(isinstance(where, str), f"where should be text, found {where!r}")

    def _log(self, run: RunInfo, steps: range, outcome: str = FINISHED) -> None:
        tracker = self.make(run)
        for step in steps:
            tracker.log(step, _values(step))
        tracker.flush()
        tracker.close(outcome)

    def _compare(self, record: Record, expected: Mapping[int, Mapping[str, float]]) -> None:
        found: dict[int, dict[str, float]] = {}
        for step, values in record.items() if isinstance(record, Mapping) else record:
            twice = sorted(found.get(step, {}).keys() & values.keys())
            require(not twice, f"step {step} has {', '.join(twice)} twice: remove the steps after RunInfo.resumed_from")
            found.setdefault(step, {}).update(values)
        require(sorted(found) == sorted(expected), f"it has the steps {sorted(found)}, expected {sorted(expected)}")
        for step, values in expected.items():
            for name, value in values.items():
                got = found[step].get(name)
                same = got is not None and (got == value or (math.isnan(got) and math.isnan(value)))
                require(same, f"step {step} has {name} = {got}, expected {value}")


def _values(step: int) -> dict[str, float]:
    return {"reward/mean": step / 8, "eval/sort/mean@4": 0.5, "train/kl": math.nan, "perf/tokens": 2.0**20 + step}
