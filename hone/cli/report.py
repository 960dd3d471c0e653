"""`hone report`: the page of a run, built again from what is in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from hone.tracking.report import build_report


def report(run: Annotated[Path, typer.Argument(help="run folder; the run may still be going on")]) -> None:
    """Rebuild the report page of a run."""
    page = build_report(run)
    Console().print(f"report: {escape(str(page))}", soft_wrap=True)
