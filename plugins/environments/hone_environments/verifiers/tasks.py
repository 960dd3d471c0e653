"""The tasks of a `verifiers` taskset as rows; `rows.py` reads them in the Python that has the package.

hone --settings--> python rows.py --JSON lines--> rows with the columns messages, task, data_source
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

from hone.data.settings import RowsConfig
from hone.data.sources.base import DataError, ListRows, Row
from hone.processes.child import tail_of
from hone.processes.supervisor import FOLDER
from hone.processes.tree import ProcessTree
from hone.processes.untrusted_json import parse_json
from hone_environments.settings import VerifiersTasksSettings

PROGRAM = Path(__file__).with_name("rows.py")
GLANCE_S = 0.05
LAST_LINES = 8


def open_tasks(config: RowsConfig) -> ListRows:
    """Open the tasks of a taskset. Raises DataError, with the last lines that the package printed."""
    settings = config.source
    assert isinstance(settings, VerifiersTasksSettings)
    place = f"verifiers taskset {settings.taskset}"
    with tempfile.TemporaryDirectory(prefix="hone-tasks-") as folder:
        rows, log = Path(folder) / "rows.jsonl", Path(folder) / "log.txt"
        wanted = json.dumps(settings.model_dump(include={"taskset", "options", "size"}))
        command = [settings.python or sys.executable, str(PROGRAM), wanted, str(rows)]
        how = _run(command, folder, log, settings.timeout_s)
        if how != "exit status 0":
            raise DataError(f"{place} cannot be read: {how}; it printed:\n{tail_of(log, LAST_LINES)}")
        return ListRows(_rows(rows, place), place)


def _run(command: list[str], folder: str, log: Path, timeout_s: float) -> str:
    """Run a command to its end; returns how it ended."""
    deadline = time.monotonic() + timeout_s
    with log.open("wb") as output:
        try:
            tree = ProcessTree(command, {FOLDER: folder}, output)
        except OSError as error:
            return f"it cannot be started ({error})"
    try:
        while tree.alive:
            if time.monotonic() > deadline:
                return f"it was not ready after {timeout_s:g} s (source.timeout_s)"
            time.sleep(GLANCE_S)
        return tree.ended
    finally:
        for _ in tree.ending(0):
            time.sleep(GLANCE_S)


def _rows(path: Path, place: str) -> list[Row]:
    try:
        return [parse_json(line) for line in path.read_bytes().splitlines()]
    except ValueError as error:
        raise DataError(f"{place}: a task is no JSON that hone reads: {error}") from error


__all__ = ["open_tasks"]
