"""Run a tracker of another library in its own thread, so that a slow network delays no step, only a checkpoint.

    run's thread --queue (bounded)--> tracker's thread --> library --> network or disk
         ^                                  |
         `------ its error, at the next call'

The run's thread waits only to start, flush and close the tracker, each for at most `timeout_s`. The tracker's
thread waits for the next item; it is a daemon, so a library that never returns cannot keep the process alive.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from hone.tracking.base import FINISHED, RolloutRecord, Tracker, TrackingError

_WAITING_CALLS = 256  # with so many unsent calls, the service has stopped answering


class Background(Tracker):
    """A tracker behind a queue. Every call raises TrackingError after the tracker has failed or stopped answering."""

    def __init__(self, name: str, build: Callable[[], Tracker], timeout_s: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._items: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(_WAITING_CALLS)
        self._tracker: Tracker | None = None
        self._error: BaseException | None = None
        self._outcome = FINISHED
        self._busy_since: float | None = time.monotonic()
        self._ready = threading.Event()
        self._flushed = threading.Event()  # of the last flush; a new one for each
        self._given_up = threading.Event()  # the run calls no more, and does not wait for the end
        self._thread = threading.Thread(target=self._serve, args=(build,), name=f"tracker {name}", daemon=True)
        self._thread.start()
        if not self._ready.wait(timeout_s):
            self._error = TrackingError("it did not start in time")
            raise TrackingError(f"tracker {name!r} did not start within {timeout_s:g} s")
        self._raise_failure()
        self.where = self._tracker.where if self._tracker is not None else ""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._queue(lambda tracker: tracker.log(step, values))

    def rollouts(self, step: int, records: Sequence[RolloutRecord]) -> None:
        self._queue(lambda tracker: tracker.rollouts(step, records))

    def flush(self) -> None:
        """Have what was logged so far written, and wait for it: a checkpoint becomes valid next.

        It waits as long as the tracker goes on: each call has `timeout_s`.
        """
        flushed = self._flushed = threading.Event()

        def flush(tracker: Tracker) -> None:
            tracker.flush()
            flushed.set()

        self._queue(flush)
        while not flushed.wait(self._left_s()):
            if self._left_s() <= 0:
                self._given_up.set()
                raise TrackingError(
                    f"tracker {self._name!r} has not answered for {self._timeout_s:g} s, before a checkpoint"
                )
        self._raise_failure()

    def _left_s(self) -> float:
        """Seconds until the call that runs is late."""
        since = self._busy_since
        return self._timeout_s if since is None else since + self._timeout_s - time.monotonic()

    def _queue(self, call: Callable[[Tracker], None]) -> None:
        self._raise_failure()
        if self._left_s() < 0:
            self._given_up.set()
            raise TrackingError(f"tracker {self._name!r} has not answered for {self._timeout_s:g} s")
        try:
            self._items.put_nowait(call)
        except queue.Full as error:
            self._given_up.set()
            raise TrackingError(f"tracker {self._name!r} has fallen {_WAITING_CALLS} calls behind") from error

    def close(self, outcome: str = FINISHED) -> None:
        self._outcome = outcome
        deadline = time.monotonic() + self._timeout_s
        try:
            self._items.put(None, timeout=self._timeout_s)
        except queue.Full as error:
            raise TrackingError(f"tracker {self._name!r} did not accept the last steps, so it lacks them") from error
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        self._raise_failure()
        if self._thread.is_alive():
            left = self._items.qsize()
            raise TrackingError(
                f"tracker {self._name!r} did not finish within {self._timeout_s:g} s; "
                f"it may lack the last {left} or more steps"
            )

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise TrackingError(f"tracker {self._name!r} failed: {_one_line(self._error)}") from self._error

    def _serve(self, build: Callable[[], Tracker]) -> None:
        """Consume calls until None, an error, or the run gives up; the next call raises that error.

        Whatever ends it, the tracker is closed, so that no port, file or listener of it stays open.
        """
        tracker: Tracker | None = None
        try:
            tracker = build()
            if self._error is not None:  # the run gave up waiting for it
                return
            self._tracker = tracker
            self._busy_since = None
            self._ready.set()
            while not self._given_up.is_set() and (call := self._items.get()) is not None:
                self._busy_since = time.monotonic()
                call(tracker)
                self._busy_since = None
            closing, tracker = tracker, None
            closing.close(self._outcome)
        except BaseException as error:  # noqa: BLE001 (sys.exit() and panics too: the next call reports it)
            self._error = error
        finally:
            self._ready.set()
            self._flushed.set()
            if tracker is not None:
                with suppress(BaseException):  # it has failed, and that is reported
                    tracker.close(self._outcome)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
