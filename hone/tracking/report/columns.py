"""The metrics of a run by name, read from `metrics.jsonl` as the file grows.

metrics.jsonl --whole lines since the last read--> Columns: name -> steps, values --thinned--> a curve on the page
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from hone.tracking.trackers.jsonl import to_float

_PART = 1 << 22  # bytes that one read parses at most, so that a page can show what is there meanwhile


@dataclass(slots=True)
class Column:
    """The steps that have a metric, and its values."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, steps: Sequence[int], values: Sequence[Any]) -> int:
        """Append points in the order of their steps; returns how many are not finite.

        NaN and infinities are text in the file, and anything else that is no number is left out.
        """
        try:
            numbers = array("d", values)
        except (TypeError, OverflowError):
            known = [
                (step, number)
                for step, value in zip(steps, values, strict=True)
                if (number := to_float(value)) is not None
            ]
            steps, numbers = [step for step, _ in known], array("d", [number for _, number in known])
        self.steps.extend(steps)
        self.values.extend(numbers)
        return 0 if math.isfinite(sum(numbers)) else sum(not math.isfinite(number) for number in numbers)

    def finite(self) -> list[tuple[int, float]]:
        """The points whose value is neither NaN nor infinite."""
        return [(step, value) for step, value in zip(self.steps, self.values, strict=True) if math.isfinite(value)]


class Columns(dict[str, Column]):
    """Columns by metric, with the number of values that are not finite and of lines that could not be read."""

    def __init__(self) -> None:
        super().__init__()
        self.last_step = 0
        self.lines = 0
        self.broken = 0
        self.not_finite = 0

    def add(self, lines: Iterable[bytes]) -> None:
        """Add lines of `metrics.jsonl`. Lines with the same metrics are added together: a tenth of the time."""
        alike: dict[tuple[str, ...], list[tuple[Any, ...]]] = {}
        for line in lines:
            record = _record(line)
            if record is None:
                self.broken += 1
                continue
            self.lines += 1
            self.last_step = record["step"]
            alike.setdefault(tuple(record), []).append(tuple(record.values()))
        found: dict[str, list[tuple[int, Sequence[Any]]]] = {}  # metric -> which group of lines, values in it
        steps: list[Sequence[int]] = []
        for group, (names, rows) in enumerate(alike.items()):
            columns = dict(zip(names, zip(*rows, strict=True), strict=True))
            steps.append(columns.pop("step"))
            for name, values in columns.items():
                found.setdefault(name, []).append((group, values))
        orders: dict[tuple[int, ...], tuple[list[int], list[int]]] = {}
        for name, parts in found.items():
            groups = tuple(group for group, _ in parts)
            if groups not in orders:
                joined = [step for group in groups for step in steps[group]]
                order = sorted(range(len(joined)), key=joined.__getitem__)
                orders[groups] = order, [joined[place] for place in order]
            order, ordered = orders[groups]
            every = [value for _, values in parts for value in values]
            if len(groups) > 1:
                every = [every[place] for place in order]
            self.not_finite += self.setdefault(name, Column()).add(ordered, every)

    @property
    def names(self) -> list[str]:
        """Every metric, sorted."""
        return sorted(self)

    def rows(self) -> list[dict[str, float]]:
        """The metrics of each step, with the key `step`, in order."""
        rows: dict[int, dict[str, float]] = {}
        for name, column in self.items():
            for step, value in zip(column.steps, column.values, strict=True):
                rows.setdefault(step, {"step": step})[name] = value
        return [rows[step] for step in sorted(rows)]

    def last(self, name: str) -> float:
        """The last value of a metric; NaN if there is none."""
        column = self.get(name)
        return column.values[-1] if column else math.nan

    def total(self, name: str) -> float:
        """The sum of the finite values of a metric; 0 if there is none."""
        column = self.get(name)
        return math.fsum(filter(math.isfinite, column.values)) if column else 0.0


class MetricsFile:
    """Follows one `metrics.jsonl`. A run that goes back to a checkpoint shortens its file, which is then read anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._tail = b""  # the last line read: if another stands in its place, the file was shortened meanwhile
        self.columns = Columns()
        self.written: float | None = None  # when the file was last written, in seconds since the epoch

    def read(self, most: int = _PART) -> bool:
        """Read whole lines, at most about `most` bytes; returns whether there may be more.

        Raises FileNotFoundError if there is no file.
        """
        with self._path.open("rb") as file:
            self.written = self._path.stat().st_mtime
            file.seek(self._offset - len(self._tail))
            if self._offset and file.read(len(self._tail)) != self._tail:
                self._offset, self._tail, self.columns = 0, b"", Columns()
                file.seek(0)
            part = file.read(most)
            while part and not part.endswith(b"\n") and b"\n" not in part and (more := file.read(most)):
                part += more
        whole = part[: part.rfind(b"\n") + 1]
        if not whole:
            return False
        self._offset += len(whole)
        self._tail = whole[whole.rfind(b"\n", 0, -1) + 1 :]
        self.columns.add(whole.splitlines())
        return len(part) >= most


def thinned(column: Column, most: int) -> Iterator[tuple[int, float]]:
    """At most about `most` points: the smallest and the largest value of each stretch, and what is not finite.

    The first and the last point are kept.
    """
    steps, values = column.steps, column.values
    count = len(values)
    if count <= most:
        yield from zip(steps, values, strict=True)
        return
    kept = bytearray(count)
    kept[0] = kept[-1] = 1
    stretches = max(most // 2, 1)
    start = 0
    for i in range(1, stretches + 1):
        end = i * count // stretches
        part = values[start:end]
        if not math.isfinite(sum(part)):
            odd = next((place for place, value in enumerate(part) if not math.isfinite(value)), None)
            if odd is not None:  # else only the sum is too large
                kept[start + odd] = 1
                part = array("d", filter(math.isfinite, part))
        if part:
            kept[values.index(min(part), start, end)] = kept[values.index(max(part), start, end)] = 1
        start = end
    yield from zip(compress(steps, kept), compress(values, kept), strict=True)


def _record(line: bytes) -> Mapping[str, Any] | None:
    try:
        record = from_json(line)
    except ValueError:
        return None
    whole = isinstance(record, dict) and isinstance(record.get("step"), int) and abs(record["step"]) < 2**63
    return record if whole else None
