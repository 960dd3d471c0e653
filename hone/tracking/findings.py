"""Findings of a run's rules while it goes on, in `findings.jsonl`: the marks on its charts.

    the rules (hone.diagnosis) --a line when one begins to hold--> findings.jsonl --> marks in the report and hone watch

A run that goes back to a checkpoint removes the lines of later steps, as it does with its metrics.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hone.tracking.trackers.jsonl import to_line

FINDINGS_FILE = "findings.jsonl"
MOST = 200  # marks that a page shows: the last ones


def read_findings(folder: Path, notes: list[str] | None = None) -> list[dict[str, Any]]:
    """The findings in the order in which they began; lines that are damaged are left out, which `notes` then says.

    Keys: `step`, `title`, `weight`, `seen`, `meaning`, `tries`, `metrics`.
    """
    path = folder / FINDINGS_FILE
    if not path.is_file():
        return []
    found = []
    lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last line is being written
    for line in lines:
        try:
            one = json.loads(line)
        except ValueError:
            continue
        if isinstance(one, dict) and isinstance(one.get("step"), int) and isinstance(one.get("metrics"), list):
            found.append(one)
    if notes is not None and len(found) < len(lines):
        notes.append(f"{len(lines) - len(found):,} lines of {path.name} could not be read and were skipped.")
    return found


def replace_findings(folder: Path, findings: Iterable[Mapping[str, Any]]) -> None:
    """Write the file anew with these findings. Raises OSError."""
    path = folder / FINDINGS_FILE
    temporary = path.with_suffix(".partial")
    temporary.write_bytes(b"".join(map(to_line, findings)))
    os.replace(temporary, path)


def add_finding(folder: Path, finding: Mapping[str, Any]) -> None:
    """Append a finding. Raises OSError."""
    with (folder / FINDINGS_FILE).open("ab") as file:
        file.write(to_line(finding))


def marks_of(findings: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The last `MOST` findings as a page needs them: step, metrics, sentence and weight."""
    marks = [
        {
            "step": one["step"],
            "metrics": [str(name) for name in one["metrics"]],
            "title": str(one.get("title", "")),
            "seen": str(one.get("seen", "")),
            "meaning": str(one.get("meaning", "")),
            "tries": [str(text) for text in one.get("tries") or []],
            "weight": str(one.get("weight", "")),
        }
        for one in findings
    ]
    return marks[-MOST:]
