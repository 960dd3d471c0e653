"""A timeline of the run in Chrome's trace format, for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

trace.json     [                                      an array without an end: both programs read it as it grows
               {"name": "generate", "ph": "X", ...},  one line for each activity, written when a step is logged
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hone.config import Choice
from hone.tracking.activity import Activities
from hone.tracking.base import DRIVER, FINISHED, RunInfo, Tracker, TrackingError
from hone.tracking.settings import TraceSettings

TRACE_FILE = "trace.json"
STEPS = "steps"
IDLE = {DRIVER: "other work"}  # what a lane does without a note; the others wait


class TraceTracker(Tracker):
    """Appends to trace.json until it has `max_mib`; a continued run appends to what it has."""

    own_thread = False

    def __init__(self, settings: Choice, run: RunInfo) -> None:
        chosen = settings if isinstance(settings, TraceSettings) else TraceSettings()
        path = run.run_dir / TRACE_FILE
        self.where = str(path)
        self._room = chosen.max_mib * 2**20
        self._lanes: dict[str, int] = {}
        self._step_began = time.time()
        path.parent.mkdir(parents=True, exist_ok=True)
        if run.resumed_from is None or not path.is_file():
            path.write_text("[\n", encoding="utf-8")
        else:  # a killed launch may have left half a line
            whole = path.read_bytes()
            os.truncate(path, whole.rfind(b"\n") + 1)
            names = [event for event in read_trace(path) if event["name"] == "thread_name"]
            self._lanes = {event["args"]["name"]: event["tid"] for event in names}
        self._room -= path.stat().st_size
        self._file = path.open("a", encoding="utf-8")
        self._activities = Activities()
        self._write({"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": run.name}})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = time.time()
        self._span(STEPS, f"step {step}", self._step_began, now)
        self._step_began = now
        self._take()

    def flush(self) -> None:
        self._file.flush()

    def close(self, outcome: str = FINISHED) -> None:
        try:
            self._take()
        finally:
            self._activities.close()
            self._file.close()

    def _take(self) -> None:
        for lane, doing, start, end in self._activities.take(until_now=True):
            self._span(lane, doing or IDLE.get(lane, "idle"), start, end)
        self._file.flush()

    def _span(self, lane: str, name: str, start: float, end: float) -> None:
        if lane not in self._lanes:
            self._lanes[lane] = len(self._lanes) + 1
            thread = {"pid": 1, "tid": self._lanes[lane], "ph": "M"}
            self._write({"name": "thread_name", **thread, "args": {"name": lane}})
            self._write({"name": "thread_sort_index", **thread, "args": {"sort_index": _order(lane)}})
        span = {"name": name, "ph": "X", "pid": 1, "tid": self._lanes[lane]}
        begins = round(start * 1e6)  # a span that ends later than the next begins is drawn, or dropped, as its parent
        self._write({**span, "ts": begins, "dur": round(end * 1e6) - begins})

    def _write(self, event: Mapping[str, Any]) -> None:
        line = f"{json.dumps(event)},\n"
        self._room -= len(line)
        if self._room < 0:
            self._activities.close()  # nobody takes them any more
            raise TrackingError(f"{self.where} has reached its limit, max_mib of the tracker trace")
        self._file.write(line)


def _order(lane: str) -> int:
    """Steps first, then the driver, then the others by name."""
    return {STEPS: 0, DRIVER: 1}.get(lane, 2)


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a trace; an incomplete last line is left out."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line.rstrip(",\n")) for line in lines if line.startswith("{") and line.endswith(",\n")]
