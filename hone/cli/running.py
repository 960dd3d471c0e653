"""What a training command prints at its end, and its exit code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.markup import escape

from hone.cli.errors import BAD_INPUT, EXIT_FAILED, RunFailed, one_line, say
from hone.runtime import ranks
from hone.runtime.base import RankLost
from hone.tracking.report.build import build_report
from hone.tracking.terminal import LastingConsole
from hone.trainers.run.folder import set_aside
from hone.trainers.run.loop import Interrupted


def report_run(folder: Path, run: Callable[[], Path], restart: bool = False) -> None:
    """Call `run`, build the report page, and print where the results are. `restart`: set an earlier run aside first.

    Bad input raises unchanged (exit code 2). Any other failure raises RunFailed, which names the folder (1). A run that
    was asked to stop raises KeyboardInterrupt (130).
    """
    console = LastingConsole(quiet=not ranks.is_first())
    if restart and ranks.is_first() and (aside := set_aside(folder)) is not None:
        console.print(f"the earlier run is now in {escape(str(aside))}", soft_wrap=True)
    try:
        run()
    except Interrupted as stop:
        _build_page(folder)
        console.print(f"[yellow]{escape(str(stop))}[/]; run the same command again to continue", soft_wrap=True)
        raise KeyboardInterrupt from stop
    except RankLost as error:  # another rank failed and reports the reason; its traceback is the useful one
        say(f"error: {one_line(error)}")
        raise SystemExit(EXIT_FAILED) from error
    except BAD_INPUT:
        raise
    except KeyboardInterrupt:
        raise
    except Exception as error:  # every other failure is reported with the run folder
        raise RunFailed(folder, error) from error
    page = _build_page(folder)
    console.print(f"run:    {escape(str(folder))}", soft_wrap=True)
    console.print(f"model:  {escape(str(folder / 'export'))}", soft_wrap=True)
    console.print(f"report: {escape(str(page))}", soft_wrap=True)


def _build_page(folder: Path) -> Path | None:
    """Build the report on the rank that writes the run folder."""
    return build_report(folder) if ranks.is_first() else None
