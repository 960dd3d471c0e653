"""When a process that died may be started again: the one policy of rewards, scorers and rollout servers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0


class Restarts:
    """At most `most` restarts within any `window_s` seconds, and at most `most` in a row that fail.

    A process that dies now and then is restarted for ever; one that dies again and again is given up.
    """

    def __init__(self, most: int, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._window_s = window_s
        self._clock = clock
        self._times: deque[float] = deque()
        self._in_a_row = 0
        self.total = 0

    def take(self) -> bool:
        """Count one restart; False, and nothing is counted, if the process has to be given up."""
        now = self._clock()
        while self._times and self._times[0] <= now - self._window_s:
            self._times.popleft()
        if max(len(self._times), self._in_a_row) >= self._most:
            return False
        self._times.append(now)
        self._in_a_row += 1
        self.total += 1
        return True

    def worked(self) -> None:
        """Note that the process is ready again."""
        self._in_a_row = 0

    @property
    def pause_s(self) -> float:
        """Return the pause before the restart just counted: none before the first within the window, then longer."""
        earlier = max(len(self._times), self._in_a_row) - 1
        return min(FIRST_PAUSE_S * 2 ** (earlier - 1), LONGEST_PAUSE_S) if earlier > 0 else 0.0

    def __str__(self) -> str:
        return f"{self._most} restarts within {self._window_s:g} s"


__all__ = ["Restarts"]
