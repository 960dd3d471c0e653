"""Activities of a run's parts: the driver's phases, busy replicas and reward workers, in this process.

    Tracking.phase --note("driver", "generate")-->|
    a replica's first and last request ---------->| listeners: the trackers `trace`, `opentelemetry`, `prometheus`
    a reward worker's batch --------------------->|

A lane does one thing at a time. Without a listener a note costs a tenth of a microsecond.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from hone.tracking.base import LISTENERS


class Activity(NamedTuple):
    """A lane did one thing from `start` to `end`, in seconds since the epoch."""

    lane: str
    doing: str
    start: float
    end: float


class Activities:
    """Collects the activities of all lanes, from now until `close`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now: dict[str, tuple[str, float]] = {}  # lane -> what it does, and since when
        self._ended: list[Activity] = []
        LISTENERS.append(self._listen)

    def take(self, until_now: bool = False) -> Sequence[Activity]:
        """The activities that ended since the last call. `until_now`: also the part so far of what goes on."""
        with self._lock:
            if until_now:
                now = time.time()
                for lane, (doing, since) in self._now.items():
                    self._end(lane, doing, since, now)
                    self._now[lane] = doing, now
            ended, self._ended = self._ended, []
            return ended

    def close(self) -> None:
        """Listen no more. May be called again."""
        if self._listen in LISTENERS:
            LISTENERS.remove(self._listen)

    def _listen(self, lane: str, doing: str, at: float) -> None:
        with self._lock:
            before, since = self._now.get(lane, ("", at))
            if before == doing and lane in self._now:
                return
            self._end(lane, before, since, at)
            self._now[lane] = doing, at

    def _end(self, lane: str, doing: str, since: float, at: float) -> None:
        if at > since:
            self._ended.append(Activity(lane, doing, since, at))
