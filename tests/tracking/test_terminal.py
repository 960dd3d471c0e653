"""The console of a run in a real terminal, tmux, at 80 and at 140 columns."""

import re
import shutil
import subprocess
import sys
import time

import pytest

from tests.trainers.tiny import recipe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ci,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux is installed (apt-get install tmux)"),
]
WAIT_S = 120.0

TRAINING = 1  # the seed of its rows
WAITING = """
import time
from pathlib import Path

def rows(seed, size):
    for _ in range(size):
        yield {{"prompt": "ab", "ground_truth": "ba", "seed": seed}}

def share(response, ground_truth, row):
    while row["seed"] == {training} and not Path({gate!r}).exists():  # the test has not read the screen yet
        time.sleep(0.02)
    return 1.0
"""


class Terminal:
    """A window of tmux with one command."""

    def __init__(self, socket):
        self._command = ("tmux", "-f", "/dev/null", "-S", str(socket))

    def call(self, *arguments):
        return subprocess.run([*self._command, *arguments], check=True, capture_output=True, text=True).stdout

    def until(self, *texts):
        """The screen once it has all of these texts."""
        deadline = time.monotonic() + WAIT_S
        while not all(re.search(text, screen := self.call("capture-pane", "-p", "-S", "-100")) for text in texts):
            assert time.monotonic() < deadline, screen.strip()
            time.sleep(0.05)
        return screen


@pytest.fixture
def terminal(tmp_path):
    tmux = Terminal(tmp_path / "tmux")
    yield tmux
    tmux.call("kill-server")


def test_a_held_out_figure_is_whole_at_80_and_at_140_columns(tmp_path, terminal):
    """And before a step has ended nothing says how much time is left."""
    gate, task = tmp_path / "gate", tmp_path / "task.py"
    run_file = recipe(tmp_path, {"run": {"steps": 1}, "tracking": {"trackers": ["console"]}})
    run_file.write_text(run_file.read_text().replace("held_out:", "held_out_words_of_four:"))
    task.write_text(WAITING.format(gate=str(gate), training=TRAINING))
    command = [sys.executable, "-m", "hone", "train", str(run_file)]
    shell = "env -u COLUMNS -u LINES " + " ".join(f"'{part}'" for part in command) + "; echo ended; cat"
    terminal.call("new-session", "-d", "-x", "80", "-y", "40", shell)
    for width in (80, 140):
        terminal.call("resize-window", "-x", str(width))
        screen = terminal.until(rf"(?m)^╭.{{{width - 2}}}╮$", r"held_out_words_of_four reward +1\.000 \(step 0\)")
        assert " left" not in screen
        assert "so far" in screen
    gate.touch()
    screen = terminal.until("ended", r"held_out_words_of_four reward +1\.000 \(step 1\)")
    assert "0:00:00 left" in screen
