"""One JSON object per line between the driver and a side: "step" asks for one step, "end" for the end.

    driver                          side (its own process, its own Python environment)
      {"ask": "step"}        -->    trains one step
                             <--    {"wall_s": 1.2, "process_s": 2.3, "tokens": 8192, ...}
      {"ask": "end"}         -->    leaves

A side's trainer runs its own loop; `Gate.wait` is called between two steps and returns when the next one is asked for.
Between steps a side sleeps on its pipe, so the other has the machine to itself. Only the standard library: both
environments import this file.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Ended(Exception):
    """The driver wants no more steps."""


def process_seconds() -> float:
    """Processor time of this process and of its live children (reward workers), all threads together."""
    own = time.process_time()
    children = Path(f"/proc/{os.getpid()}/task")
    if not children.is_dir():  # only Linux tells; elsewhere the children's time is missing
        return own
    tick = os.sysconf("SC_CLK_TCK")
    for listing in children.glob("*/children"):
        for child in listing.read_text().split():
            try:
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            except OSError:  # it ended just now
                continue
            own += (int(fields[11]) + int(fields[12])) / tick
    return own


class Gate:
    """The side's end of the wire. Takes over standard output: what libraries print goes to standard error."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._started: tuple[float, float] | None = None

    def wait(self, leave: Callable[[], None] = lambda: None, **facts: Any) -> None:
        """Report the step that ends here with `facts` about it, then sleep until another is asked for.

        `leave` runs after the step's time was taken, and before the other side may begin. The first call reports that
        the side is ready. Raises Ended if the driver wants no more.
        """
        if self._started is None:
            self._say({"ready": True, **facts})
        else:
            wall, process = self._started
            spent = {"wall_s": time.perf_counter() - wall, "process_s": process_seconds() - process}
            leave()
            self._say({**spent, **facts})
        line = sys.stdin.readline()
        if not line or json.loads(line)["ask"] == "end":
            raise Ended
        self._started = (time.perf_counter(), process_seconds())

    def finish(self, **facts: Any) -> None:
        """The last word, after `Ended`: the largest memory of this process, and `facts`."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10  # Linux counts KiB
        self._say({"ended": True, "peak_bytes": peak, **facts})

    def _say(self, message: dict[str, Any]) -> None:
        self._answers.write(json.dumps(message) + "\n")
        self._answers.flush()
