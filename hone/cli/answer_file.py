"""Answers of a command as they come: a file that a killed command leaves behind, and a count on the screen."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from hone.config import ConfigError
from hone.processes.frames import as_text

SHOW_S = 0.5  # between two counts in a terminal
TELL_S = 60.0  # between two lines in a log


class AnswerFile:
    """Writes a line for each answer when it comes; at the end they are in the order of their keys."""

    def __init__(self, path: Path | None, option: str) -> None:
        """`path` None: nothing is written. Raises ConfigError, which names the `option`, without a folder."""
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{option} {path}: there is no folder {path.parent}")
        self._path = path
        self._lines: list[tuple[tuple[int | str, ...], str]] = []
        self._file: TextIO | None = None

    def add(self, key: tuple[int | str, ...], row: Mapping[str, Any]) -> None:
        """Write one answer."""
        if self._path is not None:
            if self._file is None:  # not before: a command that fails earlier leaves an older file as it is
                self._file = self._path.open("w", encoding="utf-8", errors="backslashreplace")
            self._lines.append((key, json.dumps(row, ensure_ascii=False, default=as_text) + "\n"))
            self._file.write(self._lines[-1][1])
            self._file.flush()

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._path is None:
            return
        if self._file is not None:
            self._file.close()
        if error is None:
            ordered = self._path.with_name(f"{self._path.name}.ordered")
            text = "".join(line for _, line in sorted(self._lines, key=lambda one: one[0]))
            ordered.write_text(text, encoding="utf-8", errors="backslashreplace")
            ordered.replace(self._path)


class Count:
    """Counts answers on stderr: in place in a terminal, else a line a minute."""

    def __init__(self, what: str, total: int | None = None) -> None:
        self._what = what
        self._of = "" if total is None else f"/{total}"
        self._done = 0
        self._lives = sys.stderr.isatty()
        self._told = time.monotonic()

    def one(self) -> None:
        """Count one more."""
        self._done += 1
        now = time.monotonic()
        if now - self._told >= (SHOW_S if self._lives else TELL_S):
            self._told = now
            self._show("\r" if self._lives else "\n")

    def end(self) -> None:
        """Clear the count from a terminal."""
        if self._lives:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _show(self, end: str) -> None:
        sys.stderr.write(f"{self._done}{self._of} {self._what}{end}")
        sys.stderr.flush()
