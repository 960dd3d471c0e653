"""The end of a training command: what it raises, what the run folder records, and that there is a report."""

import errno
import json
import os
import signal
import sys

import pytest

from hone.cli.errors import EXIT_FAILED, EXIT_INTERRUPTED, RunFailed
from hone.cli.main import COMMANDS, Command, main
from hone.cli.running import report_run
from hone.tracking.base import RunInfo
from hone.tracking.facts import RUN_FILE
from hone.tracking.hub import Tracking
from hone.tracking.settings import TrackingConfig


class Panic(BaseException):
    """As a library in another language raises."""


def stop():
    os.kill(os.getpid(), signal.SIGTERM)


def exits():
    sys.exit(0)


def panics():
    raise Panic("index out of range")


def one_run(folder, during, closing):
    """A run that logs a step; `during` and `closing` are called before and after its record is closed."""

    def run():
        with Tracking(TrackingConfig(trackers=("jsonl",)), RunInfo(run_dir=folder, total_steps=1)) as hub:
            hub.begin(0)
            hub.log(1, {"train/loss": 1.0})
            during()
        closing()
        return folder

    return run


def nothing():
    pass


@pytest.mark.parametrize(
    ("during", "closing", "raised", "outcome"),
    [
        (stop, nothing, KeyboardInterrupt, "interrupted"),
        (nothing, stop, SystemExit, "finished"),
        (exits, nothing, RunFailed, "failed: SystemExit: 0"),
        (panics, nothing, RunFailed, "failed: Panic: index out of range"),
        (nothing, exits, RunFailed, "finished"),
    ],
    ids=["stopped", "stopped while it closes", "exits", "panics", "exits while it closes"],
)
def test_whatever_ends_a_run_is_recorded_and_reported(tmp_path, capsys, during, closing, raised, outcome):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(raised) as caught:
        report_run(tmp_path, one_run(tmp_path, during, closing))
    assert signal.getsignal(signal.SIGTERM) is before
    assert json.loads((tmp_path / RUN_FILE).read_text())["outcome"] == outcome
    assert (tmp_path / "report.html").is_file()
    shown = capsys.readouterr()
    if raised is SystemExit:
        assert caught.value.code == EXIT_INTERRUPTED
        assert shown.err == "interrupted; the run had finished\n"
        assert f"report: {tmp_path / 'report.html'}\n" in shown.out


def test_a_report_that_is_interrupted_can_be_built_later(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hone.cli.running.build_report", lambda folder: stop())
    with pytest.raises(SystemExit) as caught:
        report_run(tmp_path, one_run(tmp_path, nothing, nothing))
    assert caught.value.code == EXIT_INTERRUPTED
    assert f"report: hone report {tmp_path}\n" in capsys.readouterr().out


def test_a_full_disk_does_not_replace_the_end_of_a_finished_run(tmp_path, capsys, monkeypatch):
    def no_room(folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("hone.cli.running.build_report", no_room)
    with pytest.raises(SystemExit) as caught:
        report_run(tmp_path, one_run(tmp_path, nothing, stop))
    assert caught.value.code == EXIT_INTERRUPTED
    shown = capsys.readouterr()
    assert "there is no report: [Errno 28] No space left on device\ninterrupted; the run had finished\n" in shown.err
    assert f"model:  {tmp_path / 'export'}\nreport: hone report {tmp_path}\n" in shown.out


def test_a_command_that_foreign_code_leaves_has_not_succeeded(capsys, monkeypatch):
    monkeypatch.setitem(COMMANDS, "list", Command(f"{__name__}:exits", "exits"))
    assert main(["list"]) == EXIT_FAILED
    assert "sys.exit(0) was called before the command had ended" in capsys.readouterr().err
