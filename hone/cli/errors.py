"""End of a failed command: one line on stderr, and an exit code.

    0 done   1 a run failed (its folder is named), or a service   2 bad input   3 done, decisions left   130 interrupted

The traceback is printed with `HONE_TRACEBACK=1`, and always for an unexpected error outside a run. A failed run writes
it to its folder.
"""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from hone.composition import ConfigError
from hone.models.errors import ModelError
from hone.outage import Outage
from hone.processes.child import ServerFailed
from hone.registry import CannotLoad, UnknownName
from hone.tracking.base import FAILURE_FILE, printable

TRACEBACK_VARIABLE = "HONE_TRACEBACK"

EXIT_DONE, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_DECISIONS, EXIT_INTERRUPTED = 0, 1, 2, 3, 130

BAD_INPUT: tuple[type[Exception], ...] = (ConfigError, UnknownName, CannotLoad, ModelError)
"""Errors that the user can fix: a run file, a name, a data set, a model, a missing package."""

FILE_ERRORS = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)


class RunFailed(Exception):
    """A run failed after it had started. `folder` holds what it wrote; `kept` says where its traceback is."""

    def __init__(self, folder: Path, cause: BaseException, kept: str) -> None:
        super().__init__(f"{type(cause).__name__}: {one_line(cause)}")
        self.folder = folder
        self.kept = kept


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt at a SIGTERM, so that the command closes what it started; the handler is put back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def report(error: BaseException, command: str = "") -> int:
    """Print the error to stderr; return the exit code of the command."""
    show = os.environ.get(TRACEBACK_VARIABLE, "") not in ("", "0")
    if isinstance(error, KeyboardInterrupt):
        runs = command in ("train", "sft", "prefer", "reward-model", "distill")
        say("interrupted" + ("; run the same command again to continue from the last checkpoint" if runs else ""))
        code = EXIT_INTERRUPTED
    elif isinstance(error, RunFailed):
        say(f"error: the run failed: {error}")
        say(f"the run is in {error.folder}; {error.kept}")
        code = EXIT_FAILED
    elif isinstance(error, BAD_INPUT) or (isinstance(error, FILE_ERRORS) and error.filename is not None):
        say(f"error: {one_line(error)}")
        code = EXIT_BAD_INPUT
    elif isinstance(error, Outage | ServerFailed):
        say(f"error: {one_line(error)}")
        code = EXIT_FAILED
    else:
        show = True
        say(f"error: {type(error).__name__}: {one_line(error)}")
        code = EXIT_FAILED
    if show:
        traceback.print_exception(error)
    return code


def say(line: str) -> None:
    """Print one line to stderr; results go to stdout."""
    typer.echo(printable(line), err=True)


def one_line(error: BaseException) -> str:
    """The message of an exception on one line; for a file error, the file and the reason."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def keep_traceback(folder: Path, error: BaseException) -> str:
    """Write the traceback to the run folder, or to stderr if that fails. Return a sentence that says where it is."""
    path = folder / FAILURE_FILE
    text = "".join(traceback.format_exception(error))
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as problem:
        say(text)
        return f"the traceback is above, because {path} cannot be written ({problem.strerror})"
    return f"the traceback is in {path}"
