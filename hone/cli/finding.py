"""One line of `hone doctor`'s output."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One line, under its section."""

    section: str
    name: str
    ok: bool | None  # None: a fact that is neither good nor bad
    detail: str
