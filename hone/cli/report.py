"""`hone report`: rebuild the report page of a run from the files in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from hone.tracking.report.build import build_report


def report(run: Annotated[Path, typer.Argument(help="run folder; the run may still be in progress")]) -> None:
    """Rebuild the report page of a run from its folder."""
    page = build_report(run)
    Console().print(f"report: {escape(str(page))}", soft_wrap=True)
