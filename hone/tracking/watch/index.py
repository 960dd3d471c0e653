"""Every rollout of a run in a table, to filter, sort and search all steps of a run that is still written.

    rollouts.jsonl.gz --new gzip members--> rows of a temporary SQLite database --a query--> one page of rows
                      '--seek to a member, for one rollout with all its tokens

A member of the file is one step or one evaluation. The database is deleted when the process ends; its file has what the
table shows and the text that is searched, at most `rows.MAX_TEXT` characters of each.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from pydantic_core import from_json

from hone.tracking.base import TrackingError
from hone.tracking.report.rows import advantage_of, cut, rollout_row
from hone.tracking.trackers.jsonl import members

COLUMNS = {
    "number": "INTEGER PRIMARY KEY",
    "step": "INTEGER",
    "place": "TEXT",  # the set; `training` in training
    "prompt": "TEXT",  # the group: a prompt of a step
    "id": "TEXT",
    "sample": "INTEGER",
    "role": "TEXT",
    "status": "TEXT",
    "reward": "REAL",
    "mean": "REAL",  # reward of the group; all of its answers are in one member
    "members": "INTEGER",  # answers of the group
    "relative": "REAL",  # reward minus mean, in a group of several
    "advantage": "REAL",
    "length": "INTEGER",
    "worst": "REAL",
    "question": "TEXT",
    "response": "TEXT",
    "start": "INTEGER",  # of the member in the file
    "line": "INTEGER",  # within the member
}
HIDDEN = {"sample", "role", "start", "line"}
SHOWN = [name for name in COLUMNS if name not in HIDDEN]  # the page calls place set, and prompt group
SORTED_BY = {
    "step": "step",
    "set": "place",
    "reward": "reward",
    "length": "length",
    "worst": "worst",
    "status": "status",
    "question": "question",
    "response": "response",
    "relative": "relative",
    "advantage": "advantage",
}
GLIMPSE = 300  # characters of a text in the table
AT_ONCE = 1 << 23  # bytes of text that one read takes, so that the page can show what is there meanwhile
_TRAINING = "training"
_TOKENS, _GAP = b', "weight_versions": ', b', "logprob_gap": '  # after and before them in a line, a key each
_DAMAGED = (ValueError, KeyError, TypeError, AttributeError, OverflowError)  # what a line that somebody edited leads to


@dataclass(frozen=True, slots=True)
class Query:
    """A choice of rollouts. Empty texts filter nothing; `first` and `count` are of rows, or of groups."""

    step: str = ""
    place: str = ""
    status: str = ""
    text: str = ""
    sort: str = "step"
    down: bool = True
    grouped: bool = False
    first: int = 0
    count: int = 20


class RolloutIndex:
    """The rollouts of one run. It reads the file only once somebody asks for its rollouts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = Lock()
        self._db: sqlite3.Connection | None = None
        self._end = 0  # of the last member that was read
        self._last: tuple[int, bytes] = (0, b"")  # start and first bytes of that member: another file has others
        self._count = 0
        self.note = ""  # why the rest of the file cannot be read
        self.whole = False  # whether all members of the file are in the table

    def read(self) -> None:
        """Add the members that were written since the last call, at most about `AT_ONCE` bytes of text."""
        with self._lock:
            self._add_members()

    def find(self, query: Query) -> dict[str, Any]:
        """One page of rows, and how many rows or groups match."""
        with self._lock:
            self._add_members()
            where, values = _where(query)
            matched = self._ask(f"SELECT count(*) FROM answers WHERE {where}", *values)[0][0]
            direction = "DESC" if query.down else "ASC"
            page = (query.count, query.first)
            if query.grouped:
                units = self._ask(f"SELECT count(DISTINCT prompt) FROM answers WHERE {where}", *values)[0][0]
                prompts = self._ask(
                    f"SELECT prompt FROM answers WHERE {where} GROUP BY prompt "
                    f"ORDER BY min(step) {direction}, min(number) LIMIT ? OFFSET ?",
                    *values,
                    *page,
                )
                rows = [row for (prompt,) in prompts for row in self._rows("prompt = ? ORDER BY number", prompt)]
            else:
                units = matched
                key = SORTED_BY.get(query.sort, "step")
                order = f"ORDER BY {key} IS NULL, {key} {direction}, number"
                rows = self._rows(f"{where} {order} LIMIT ? OFFSET ?", *values, *page)
            return {
                "rows": rows,
                "units": units,
                "matched": matched,
                "all": self._count,
                "indexed": self.whole,
                "facets": self._facets(),
            }

    def group(self, number: int) -> list[dict[str, Any]]:
        """All answers to the prompt of a rollout, with their tokens; none if there is no such rollout."""
        with self._lock:
            self._add_members()
            found = self._ask(
                "SELECT number, start, line FROM answers WHERE prompt = "
                "(SELECT prompt FROM answers WHERE number = ?) ORDER BY number",
                number,
            )
            return [rollout_row(place, from_json(text)) for place, text in self._lines(found)]

    def of_evaluations(self) -> list[bytes]:
        """The lines of the first and the last evaluation of each set: the first answers of the only role."""
        with self._lock:
            self._add_members()
            found = self._ask(
                "SELECT number, start, line FROM answers JOIN (SELECT place AS one, min(step) AS early, max(step) AS "
                "late FROM answers WHERE place != ? GROUP BY place) ON place = one AND (step = early OR step = late) "
                "WHERE sample = 0 AND role = '' ORDER BY number",
                _TRAINING,
            )
            return [text for _, text in self._lines(found)]

    def close(self) -> None:
        """Delete the database."""
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None

    # ------------------------------------------------------------------------------------------------------ inside

    def _ask(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        assert self._db is not None
        return self._db.execute(sql, values).fetchall()

    def _rows(self, where: str, *values: Any) -> list[dict[str, Any]]:
        """Rows of the table, by the names that the page gives their columns."""
        found = self._ask(f"SELECT {', '.join(SHOWN)} FROM answers WHERE {where}", *values)
        rows = [dict(zip(SHOWN, row, strict=True)) for row in found]
        for row in rows:
            place = row.pop("place")
            row |= {"set": None if place == _TRAINING else place, "group": row.pop("prompt")}
        return rows

    def _facets(self) -> dict[str, list[Any]]:
        each = {"steps": "step", "sets": "place", "statuses": "status"}
        return {
            key: [value for (value,) in self._ask(f"SELECT DISTINCT {column} FROM answers ORDER BY {column}")]
            for key, column in each.items()
        }

    def _add_members(self) -> None:
        if self._db is None:
            self._db = sqlite3.connect("", check_same_thread=False)  # a file that only SQLite knows
            self._clear()
        if not self._path.is_file():
            if self._count:  # removed since
                self._clear()
            self.whole = True
            return
        with self._path.open("rb") as file:
            file.seek(self._last[0])
            if file.read(len(self._last[1])) != self._last[1]:  # the run was begun anew, or went back to a checkpoint
                self._clear()
        taken, self.whole, self.note = 0, False, ""
        try:
            for member in members(self._path, self._end):
                if not member.whole:
                    break
                self._add(member.text.splitlines(), self._end, member.end)
                taken += len(member.text)
                if taken >= AT_ONCE:
                    return
        except TrackingError as error:
            self.note = f"{error}. This page has rollouts from before that place."
        self.whole = True

    def _clear(self) -> None:
        assert self._db is not None
        self._end, self._count, self._last = 0, 0, (0, b"")
        columns = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
        self._db.executescript(
            f"DROP TABLE IF EXISTS answers; CREATE TABLE answers ({columns}); DROP TABLE IF EXISTS texts; "
            "CREATE TABLE texts (number INTEGER PRIMARY KEY, text TEXT); CREATE INDEX by_step ON answers (step); "
            "CREATE INDEX by_prompt ON answers (prompt, step, number); CREATE INDEX by_place ON answers (place, step); "
            "CREATE INDEX by_status ON answers (status)"
        )

    def _add(self, lines: Sequence[bytes], start: int, end: int) -> None:
        assert self._db is not None
        rows: list[dict[str, Any]] = []
        for line, text in enumerate(lines):
            with suppress(*_DAMAGED):  # such a line keeps its number, and is not shown
                rows.append({"number": self._count, "start": start, "line": line, **_values(_record(text))})
            self._count += 1
        groups: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            groups.setdefault(row["prompt"], []).append(row)
        for group in groups.values():
            rewards = [row["reward"] for row in group if row["reward"] is not None]
            mean = math.fsum(rewards) / len(rewards) if rewards else None
            for row in group:
                known = mean is not None and row["reward"] is not None and len(group) > 1
                row |= {"mean": mean, "members": len(group), "relative": row["reward"] - mean if known else None}
        names = list(COLUMNS)
        marks = ", ".join("?" * len(names))
        self._db.executemany(f"INSERT INTO answers VALUES ({marks})", [[row[name] for name in names] for row in rows])
        self._db.executemany("INSERT INTO texts VALUES (?, ?)", [(row["number"], row["text"]) for row in rows])
        self._db.commit()
        with self._path.open("rb") as file:
            file.seek(start)
            self._last = (start, file.read(min(end - start, 4096)))
        self._end = end

    def _lines(self, found: Iterable[tuple[Any, ...]]) -> Iterable[tuple[int, bytes]]:
        """Number and text of lines, which are read from their members."""
        kept: tuple[int, list[bytes]] = (-1, [])
        for number, start, line in found:
            if kept[0] != start:
                try:
                    member = next(iter(members(self._path, start)), None)
                except (OSError, TrackingError):  # removed, or cut, since it was indexed
                    member = None
                if member is None:
                    return
                kept = (start, member.text.splitlines())
            yield number, kept[1][line]


def _where(query: Query) -> tuple[str, list[Any]]:
    parts: list[str] = []
    values: list[Any] = []
    for column, value in (("step", query.step), ("place", query.place), ("status", query.status)):
        if value:
            parts.append(f"{column} = ?")
            values.append(value)
    if query.text:
        parts.append("number IN (SELECT number FROM texts WHERE instr(text, ?) > 0)")
        values.append(query.text.lower())
    return " AND ".join(parts) or "1", values


def _record(line: bytes) -> dict[str, Any]:
    """A line without its tokens: these come last and are most of it."""
    head, tokens, rest = line.partition(_TOKENS)
    gap = rest.rpartition(_GAP)[2]
    if tokens and gap:
        with suppress(ValueError):  # the mark was inside a value: then the whole line is parsed
            return {**from_json(head + b"}"), "logprob_gap": from_json(gap[: gap.rindex(b"}")])}
    return dict(from_json(line))


def _stored(value: Any) -> int:
    """A whole number that SQLite holds. Raises OverflowError for a larger one."""
    number = int(value)
    if abs(number) >= 2**63:
        raise OverflowError(f"{number:.3e} is too large")
    return number


def _values(record: dict[str, Any]) -> dict[str, Any]:
    """The columns of a line that it has itself, and `text`: what is searched, in lower case."""
    gaps = [abs(float(gap)) for gap in record.get("logprob_gap") or [] if isinstance(gap, int | float)]
    gaps = [gap for gap in gaps if math.isfinite(gap)]
    prompt, response = cut(record.get("prompt", "")), cut(record.get("response", ""))
    question = cut(record.get("question") or prompt)
    place, reward = record.get("set"), record.get("reward")
    sample, role = _stored(record.get("sample", 0)), str(record.get("role") or "")
    return {
        "step": _stored(record["step"]),
        "place": str(place or _TRAINING),
        "prompt": f"{record['step']} {place or ''} {record.get('prompt_id', '')} {record.get('draw', '')}",
        "id": f"{record.get('prompt_id', '')} #{sample} {role}".rstrip(),
        "sample": sample,
        "role": role,
        "status": str(record.get("status", "")),
        "reward": reward if isinstance(reward, int | float) and math.isfinite(reward) else None,
        "advantage": advantage if isinstance(advantage := advantage_of(record), float) else None,
        "length": _stored(record.get("response_length", len(record.get("tokens") or []))),
        "worst": max(gaps) if gaps else None,
        "question": question[:GLIMPSE],
        "response": response[:GLIMPSE],
        "text": f"{question}\n{prompt}\n{response}".lower(),
    }
