"""One check of the conformance kit, its result, and how a section reports it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from hone.registry import reason
from hone.testing.contract import Absent

Status = Literal["works", "fails", "absent"]
LONGEST = 600  # characters of a reason


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one check."""

    section: str
    name: str
    status: Status
    reason: str = ""  # of a failure or absence
    figures: dict[str, Any] = field(default_factory=dict)  # name with unit -> number or text
    seconds: float = 0.0


class Recorder:
    """Reports the results of one section, each as soon as it is known."""

    def __init__(self, section: str, report: Callable[[Result], None]) -> None:
        self._section = section
        self._report = report

    @contextmanager
    def check(self, name: str) -> Iterator[dict[str, Any]]:
        """Run the block as a check; it fills in figures. An exception is the reason of a failure and ends the check."""
        figures: dict[str, Any] = {}
        started = time.perf_counter()
        status: Status = "works"
        why = ""
        try:
            yield figures
        except Absent as missing:
            status, why = "absent", str(missing)
        except Exception as error:  # noqa: BLE001  a vendor's code may raise anything; the reason is reported
            status, why = "fails", reason(error)[:LONGEST]
        self._report(Result(self._section, name, status, why, figures, round(time.perf_counter() - started, 3)))
