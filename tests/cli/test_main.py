"""The `hone` command from outside: help, exit codes, one line per error, plug-in warnings, Ctrl-C."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hone.cli.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, RunFailed, keep_traceback, report
from hone.cli.main import COMMANDS, main
from hone.composition import ConfigError
from hone.models.errors import ModelError
from hone.outage import Outage
from hone.processes.child import ServerFailed
from hone.registry import CannotLoad, UnknownName

HONE = [sys.executable, "-m", "hone"]


def hone(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "COLUMNS": "200", **environment}
    return subprocess.run([*HONE, *arguments], capture_output=True, text=True, timeout=120, env=variables)


def test_help_names_every_command():
    done = hone("--help")
    assert done.returncode == 0
    assert done.stderr == ""
    for name, command in COMMANDS.items():
        assert f" {name} " in done.stdout
        assert command.summary in done.stdout
    assert re.findall(r"─ (Train|Look|Models|Machine) ─", done.stdout) == ["Train", "Models", "Look", "Machine"]


def test_without_arguments_the_help_is_shown(capsys):
    assert main([]) == 0
    assert "Usage: hone" in capsys.readouterr().out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("hone 0.")


def test_the_installed_command_is_this_one():
    from importlib.metadata import entry_points

    (point,) = entry_points(group="console_scripts", name="hone")
    assert point.value == "hone.cli.main:run"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["trian"],
            "error: unknown command 'trian'; did you mean 'train'? (there is: chat, check, check-loss, config,",
        ),
        (["config", "--explan", "x"], "error: No such option: --explan"),
        (["config", "gone.yaml"], "error: no run file gone.yaml"),
        (["config"], "error: no run file was given: hone config RECIPE"),
        (["list", "rewrads"], "error: unknown kind 'rewrads'; did you mean 'rewards'?"),
        (["--nonsense"], "error: No such option: --nonsense"),
        (["run.yaml"], "error: unknown command 'run.yaml': to train it, hone train run.yaml; to try it, hone check"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, expected):
    done = hone(*arguments)
    assert done.returncode == EXIT_BAD_INPUT
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(expected)


def test_the_traceback_is_shown_on_request():
    done = hone("config", "gone.yaml", HONE_TRACEBACK="1")
    assert done.returncode == EXIT_BAD_INPUT
    first, *rest = done.stderr.splitlines()
    assert first.startswith("error: no run file gone.yaml")
    assert rest[0] == "Traceback (most recent call last):"


def test_a_command_whose_module_is_broken_says_so(tmp_path, capsys, monkeypatch):
    from hone.cli import main as module

    monkeypatch.setitem(module.COMMANDS, "train", module.Command("hone.cli.no_such_module:train", "gone"))
    assert main(["train"]) == EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert error == "error: the command 'train' cannot be loaded here: No module named 'hone.cli.no_such_module'\n"


def test_a_broken_plugin_is_warned_about_and_stops_nothing(tmp_path):
    (tmp_path / "broken_plugin.py").write_text("raise OSError('no such device')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = hone("list", "rewards", PYTHONPATH=path, HONE_USE_EXTERNAL_MODULES="broken_plugin")
    assert done.returncode == 0
    assert done.stderr == "warning: plug-in broken_plugin failed to load: OSError: no such device\n"
    assert "exact_match" in done.stdout
    assert hone("list", "--help", PYTHONPATH=path, HONE_USE_EXTERNAL_MODULES="broken_plugin").stderr == ""


@pytest.mark.parametrize("stated", [ConfigError, UnknownName, CannotLoad, ModelError])
def test_what_the_person_can_mend_is_bad_input(stated, capsys):
    assert report(stated("this is\nwrong")) == EXIT_BAD_INPUT
    assert capsys.readouterr().err == "error: this is wrong\n"


@pytest.mark.parametrize("stated", [Outage, ServerFailed])
def test_what_may_be_well_next_time_is_one_line_of_a_failed_command(stated, capsys):
    assert report(stated("this\nended")) == EXIT_FAILED
    assert capsys.readouterr().err == "error: this ended\n"


def test_a_file_error_names_the_file(tmp_path, capsys):
    with pytest.raises(FileNotFoundError) as caught:
        (tmp_path / "gone").read_text()
    assert report(caught.value) == EXIT_BAD_INPUT
    assert capsys.readouterr().err == f"error: {tmp_path}/gone: No such file or directory\n"


def test_a_failed_run_names_its_folder_and_keeps_the_traceback(tmp_path, capsys):
    def fail():
        try:
            raise ZeroDivisionError("by\nzero")
        except ZeroDivisionError as error:
            raise RunFailed(tmp_path, error, keep_traceback(tmp_path, error)) from error

    with pytest.raises(RunFailed) as caught:
        fail()
    assert report(caught.value, "train") == EXIT_FAILED
    first, second = capsys.readouterr().err.splitlines()
    assert first == "error: the run failed: ZeroDivisionError: by zero"
    assert second == f"the run is in {tmp_path}; the traceback is in {tmp_path}/failure.txt"
    assert "ZeroDivisionError" in (tmp_path / "failure.txt").read_text()


def test_where_the_run_folder_cannot_be_written_the_traceback_is_shown(tmp_path, capsys):
    said = keep_traceback(tmp_path / "gone", ValueError("x"))
    assert capsys.readouterr().err.strip() == "ValueError: x"
    assert said.endswith("cannot be written (No such file or directory)")


def test_what_nobody_can_mend_shows_its_traceback(capsys):
    assert report(KeyError("inner")) == EXIT_FAILED
    shown = capsys.readouterr().err
    assert shown.startswith("error: KeyError: 'inner'")


def test_an_interrupted_run_says_how_to_go_on(capsys):
    assert report(KeyboardInterrupt(), "train") == EXIT_INTERRUPTED
    shown = capsys.readouterr().err
    assert shown == "interrupted; run the same command again to continue from the last checkpoint\n"
    assert report(KeyboardInterrupt(), "list") == EXIT_INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"


SLEEPS = "import pathlib, time\npathlib.Path({ready!r}).touch()\ntime.sleep(60)\n"
IN_A_COMMAND = """
from hone.cli import main
main.COMMANDS["list"] = main.Command("slow_plugin:slow", "sleeps")
def slow() -> None:
    import pathlib, time
    pathlib.Path({ready!r}).touch()
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("code", "number"),
    [(SLEEPS, signal.SIGTERM), (IN_A_COMMAND, signal.SIGINT)],
    ids=["SIGTERM while a plug-in loads", "Ctrl-C in the command"],
)
def test_a_signal_outside_a_run(tmp_path, code, number):
    ready = tmp_path / "ready"
    (tmp_path / "slow_plugin.py").write_text(code.format(ready=str(ready)))
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "HONE_USE_EXTERNAL_MODULES": "slow_plugin"}
    process = subprocess.Popen([*HONE, "list"], stderr=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + 60
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == EXIT_INTERRUPTED
    assert error == "interrupted\n"


ENDS_SLOWLY = """
import atexit, pathlib, threading, time
def wait():
    pathlib.Path({ready!r}).touch()
    while not pathlib.Path({ready!r} + "-sent").exists():
        time.sleep(0.02)
{waits}
"""


@pytest.mark.parametrize("waits", ["atexit.register(wait)", "threading._register_atexit(wait)"])
def test_signals_while_the_interpreter_ends_change_no_exit_code(tmp_path, waits):
    ready = tmp_path / "ready"
    (tmp_path / "slow_plugin.py").write_text(ENDS_SLOWLY.format(ready=str(ready), waits=waits))
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "HONE_USE_EXTERNAL_MODULES": "slow_plugin"}
    process = subprocess.Popen([*HONE, "list", "nothing"], stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    assert "nothing" in process.stderr.readline()  # the command has ended
    deadline = time.monotonic() + 60
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    for number in (signal.SIGTERM, signal.SIGINT):
        process.send_signal(number)
    Path(f"{ready}-sent").touch()
    process.communicate(timeout=60)
    assert process.returncode == EXIT_BAD_INPUT


def test_a_closed_pipe_is_no_traceback():
    command = f"{' '.join(HONE)} list | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert done.stdout == "advantages\n"


def test_every_command_exists():
    """Each target names a function, and its own help is shown."""
    for name, command in COMMANDS.items():
        module, _, function = command.target.partition(":")
        path = Path(__file__).parents[2] / (module.replace(".", "/") + ".py")
        assert path.is_file(), name
        assert re.search(rf"^(def {function}\(|{function} = )", path.read_text(), re.M), name


@pytest.mark.parametrize("arguments", [["help", "list"], ["list", "-h"], ["list", "--help"]])
def test_help_has_every_usual_spelling(arguments, capsys):
    assert main(arguments) == 0
    assert "Usage: hone list" in capsys.readouterr().out
