"""Tables of completions at trackers: a few rows of some steps, so that years of runs do not fill a service.

records of a step --every so many steps, or an evaluation--> the first rows --> a table of the tracker's own kind
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hone.tracking.base import RolloutRecord
from hone.tracking.settings import TableSettings

COLUMNS = ("prompt", "response", "reward", "status")
MOST_CHARACTERS = 2_000  # of a text


@dataclass(frozen=True, slots=True)
class CompletionTable:
    """Completions of one step: `train`, or the name of a held-out set; a row has a value for each of `COLUMNS`."""

    name: str
    step: int
    rows: tuple[tuple[str, str, float | None, str], ...]

    def markdown(self) -> str:
        """The table as Markdown; line ends and bars of the texts are shown as such."""
        lines = [COLUMNS, tuple("---" for _ in COLUMNS), *self.rows]
        return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def table_of(settings: TableSettings, step: int, records: Sequence[RolloutRecord]) -> CompletionTable | None:
    """The table of these records; None if none is due. Held-out sets always have one."""
    every, rows = settings.completions_every_steps, settings.completions
    if not records or not every or (records[0]["set"] is None and step % every):
        return None
    kept = tuple(
        (_cut(str(one["question"] or one["prompt"])), _cut(str(one["response"])), one["reward"], str(one["status"]))
        for one in records[:rows]
    )
    return CompletionTable(str(records[0]["set"] or "train"), step, kept)


def _cut(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} ..."


def _cell(value: str | float | None) -> str:
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else value
    return text.replace("|", "\\|").replace("\n", "<br>")
