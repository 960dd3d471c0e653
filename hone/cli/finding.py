"""What `hone doctor` says, line by line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of an examination."""

    section: str
    name: str
    ok: bool | None  # None: a fact that is neither good nor bad
    detail: str
