"""The record of an asynchronous run: one line of `schedule.jsonl` before each update, on the disk before it begins.

    {"step": 7, "version": 6, "admitted": [28, 29], "taken": [24, 25], "dropped": {"25": "reward is 0 for all ..."},
     "spans": {"24": [[[5, 9]], [[5, 4]]]}, "batch": "9f86d0..."}

With `asynchrony.stream` a step has a line for each mini-batch, on the disk before the mini-batch trains. Every line but
the last has `"more": true`; the last one has the digest of the whole batch. `read_journal` joins them to one record.

`version` names the weights that the step trains; `spans` has for each draw and answer the runs of tokens,
[version, tokens]; where prompts are answered greedily too, this answer is the last one. A step without an update has
a line too, without `batch`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from hone.full_disk import wait_for_room
from hone.schedule.replay import RecordedRun

JOURNAL = "schedule.jsonl"


class Journal:
    """Appends records, each with its `step`.

    The first one removes the records of its step and of later steps, which a resumed run writes again.
    """

    def __init__(self, path: Path, plan: RecordedRun | None = None) -> None:
        """`plan`: the record that this run replays."""
        self.plan = plan
        self._path = path
        self._is_cut = False
        self._parts: list[Mapping[str, Any]] = []  # of the step that has more to come

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record, or with `more` a part of one; when this returns, it is on the disk.

        Raises ReplayError if the whole record is not the one of the plan.
        """
        self._parts.append(record)
        if not record.get("more"):
            whole, self._parts = _joined(self._parts), []
            if self.plan is not None:
                self.plan.check(whole)
        if not self._is_cut:
            self._cut(record["step"])
            self._is_cut = True
        rest, since = memoryview((json.dumps(record) + "\n").encode()), 0.0
        with self._path.open("ab", buffering=0) as file:  # without a buffer, which would write its text again
            while rest:
                try:
                    rest = rest[os.write(file.fileno(), rest) :]
                except OSError as error:
                    since = wait_for_room(error, since)
            os.fsync(file.fileno())

    def _cut(self, step: int) -> None:
        if not self._path.is_file():
            return
        with self._path.open("r+b") as file:  # line by line: a long run's journal may be larger than the memory
            kept = 0
            for line in file:
                if not line.endswith(b"\n") or json.loads(line)["step"] >= step:
                    break
                kept += len(line)
            file.truncate(kept)
            os.fsync(file.fileno())


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a journal, one for each step, in order; a last step that a kill cut off is left out."""
    parts: list[Mapping[str, Any]] = []
    for line in _lines(path):
        parts.append(line)
        if not line.get("more"):
            yield _joined(parts)
            parts = []


def _joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The record of a step from its parts, in order."""
    whole = reduce(_both, parts)
    return {name: value for name, value in whole.items() if name != "more"}


def _both(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    lists = {name: [*one[name], *other[name]] for name in ("admitted", "taken")}
    mappings = {name: {**one[name], **other[name]} for name in ("dropped", "spans")}
    return {**one, **other, **lists, **mappings}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


__all__ = ["JOURNAL", "Journal", "read_journal"]
