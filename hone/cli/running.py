"""How a training command ends: what it says, and with which exit code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from hone.cli.errors import BAD_INPUT, EXIT_FAILED, RunFailed, one_line, say
from hone.runtime import ranks
from hone.runtime.base import RankLost
from hone.tracking.report import build_report
from hone.trainers.base import Interrupted


def report_run(folder: Path, run: Callable[[], Path]) -> None:
    """Run a run, build its page, and say where everything is.

    Bad input passes through as it is (exit code 2); anything else that ends the run becomes RunFailed, which names the
    folder (1); a run that was asked to stop leaves with KeyboardInterrupt (130).
    """
    console = Console(quiet=not ranks.is_first())
    try:
        run()
    except Interrupted as stop:
        _build_page(folder)
        console.print(f"[yellow]{escape(str(stop))}[/]; the same command continues from there", soft_wrap=True)
        raise KeyboardInterrupt from stop
    except RankLost as error:  # a consequence; the rank that failed says why, and its traceback is the one to keep
        say(f"error: {one_line(error)}")
        raise SystemExit(EXIT_FAILED) from error
    except BAD_INPUT:
        raise
    except KeyboardInterrupt:
        raise
    except Exception as error:  # whatever ends a run is shown with the folder that holds what was reached
        raise RunFailed(folder, error) from error
    page = _build_page(folder)
    console.print(f"run:    {escape(str(folder))}", soft_wrap=True)
    console.print(f"model:  {escape(str(folder / 'export'))}", soft_wrap=True)
    console.print(f"report: {escape(str(page))}", soft_wrap=True)


def _build_page(folder: Path) -> Path | None:
    """The run's page, from the rank that writes the run folder."""
    return build_report(folder) if ranks.is_first() else None
