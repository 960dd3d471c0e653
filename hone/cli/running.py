"""Output of a training command at its end, and its exit code."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hone.cli.errors import (
    BAD_INPUT,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    RunFailed,
    keep_traceback,
    one_line,
    say,
    sigterm_as_ctrl_c,
)
from hone.composition import ConfigError
from hone.diagnosis.live import tell_of_memory
from hone.diagnosis.machine import is_of_memory
from hone.platforms.base import current_platform
from hone.runtime import ranks
from hone.runtime.base import RankLost
from hone.tracking.base import Interrupted, TrackingError, printable
from hone.tracking.facts import RUN_FILE
from hone.tracking.report.answers import Answer, read_beside, reward_of, shown, titles
from hone.tracking.report.build import build_report
from hone.tracking.report.rundata import HELD
from hone.tracking.terminal import LastingConsole
from hone.trainers.run.folder import finished_steps, set_aside

ON_SCREEN = 4  # prompts
BAD_INPUT_OR_STOP: tuple[type[BaseException], ...] = (*BAD_INPUT, KeyboardInterrupt)


@sigterm_as_ctrl_c()
def report_run(folder: Path, run: Callable[[], Path], restart: bool = False) -> None:
    """Call `run`, build the report page, and print where the results are. `restart`: set an earlier run aside first.

    Bad input raises unchanged (exit code 2). Any other failure raises RunFailed, which names the folder (1). A run that
    was asked to stop raises KeyboardInterrupt (130), or SystemExit with the same code if it had finished before.
    Whatever ended a run that has begun, it has a report.
    """
    console = LastingConsole(quiet=not ranks.is_first())
    if restart and ranks.is_first() and (aside := set_aside(folder)) is not None:
        console.print(f"the earlier run is now in {escape(str(aside))}", soft_wrap=True)
    before = _begun(folder)
    try:
        run()
    except Interrupted as stop:
        _try_page(folder)
        console.print(f"[yellow]{escape(str(stop))}[/]; run the same command again to continue", soft_wrap=True)
        raise KeyboardInterrupt from stop
    except RankLost as error:  # another rank failed and reports the reason; its traceback is the useful one
        say(f"error: {one_line(error)}")
        _try_page(folder)
        raise SystemExit(EXIT_FAILED) from error
    except BAD_INPUT_OR_STOP as error:
        if isinstance(error, KeyboardInterrupt) and _begun(folder) != before and finished_steps(folder) >= 0:
            _show_finished(folder, console, interrupted=True)
        if _begun(folder) != before:
            if not isinstance(error, KeyboardInterrupt):
                keep_traceback(folder, error)
            _try_page(folder)
        raise
    except BaseException as error:  # every other failure, also of foreign code, is reported with the run folder
        _note_memory(error)
        kept = keep_traceback(folder, error)
        if ranks.is_first() and _begun(folder) != before:
            tell_of_memory(folder, say)
        _try_page(folder)
        raise RunFailed(folder, error, kept) from error
    _show_finished(folder, console)


def _note_memory(error: BaseException) -> None:
    """Add what this process holds to an error of memory, while the tensors of its frames are there."""
    if is_of_memory("".join(traceback.format_exception(error))):
        memory = current_platform().memory()
        now, most, total = (f"{size / 2**20:,.0f} MiB" for size in (memory.allocated, memory.peak, memory.total))
        error.add_note(f"{HELD}{now}, at most {most}, of {total}")


def _show_finished(folder: Path, console: LastingConsole, interrupted: bool = False) -> None:
    """Build the report of a finished run, and print where the results are.

    `interrupted`: the run was stopped while it closed. Then, and if the report is interrupted, raises SystemExit.
    """
    page: Path | None = None
    try:
        page = _try_page(folder)
        if page is not None:
            _show_beside(folder, console)
    except KeyboardInterrupt:
        interrupted = True
    console.print(f"run:    {escape(str(folder))}", soft_wrap=True)
    console.print(f"model:  {escape(str(folder / 'export'))}", soft_wrap=True)
    shown = f"hone report {folder}" if page is None else str(page)
    console.print(f"report: {escape(shown)}", soft_wrap=True)
    if interrupted:
        say("interrupted; the run had finished")
        raise SystemExit(EXIT_INTERRUPTED)


def _show_beside(folder: Path, console: LastingConsole) -> None:
    """Print the first answers to held-out prompts before and after the run."""
    for one in read_beside(folder, ON_SCREEN)[:1]:
        table = Table(f"prompt of {one.set}", *titles(one), expand=True, show_lines=True)
        for prompt, before, after in one.rows:
            table.add_row(Text(printable(prompt)), _cell(before), _cell(after))
        console.print(table)


def _cell(answer: Answer) -> Text:
    return Text.assemble(printable(shown(answer)), (f"  reward {reward_of(answer)}", "dim"))


def _try_page(folder: Path) -> Path | None:
    """Build the report on the rank that writes the run folder; None: there is none, and a line said why.

    An error of the report must not take the place of what the run ended with.
    """
    try:
        return build_report(folder) if ranks.is_first() else None
    except (ConfigError, TrackingError, OSError) as error:
        say(f"there is no report: {one_line(error)}")
        return None


def _begun(folder: Path) -> int:
    """When a run in the folder last began or ended, in nanoseconds; 0: never."""
    path = folder / RUN_FILE
    return path.stat().st_mtime_ns if path.is_file() else 0
