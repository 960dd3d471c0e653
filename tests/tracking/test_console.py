"""The console: a live display on a terminal, plain lines elsewhere."""

import io
import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest
from rich.console import Console

from hone.config import Choice
from hone.tracking.base import RunInfo
from hone.tracking.console import ConsoleTracker, sparkline

VALUES = {
    "reward/mean": 0.53125,
    "eval/sort/exact_match": 0.25,
    "rollout/response_length": 18.25,
    "perf/tokens_per_s": 4321.0,
    "perf/step_s": 1.5,
}

ON_A_TERMINAL = """
import time
from pathlib import Path
from hone.config import Choice
from hone.tracking.base import RunInfo
from hone.tracking.console import ConsoleTracker

tracker = ConsoleTracker(Choice(name="console"), RunInfo(Path("sorting"), total_steps=9))
tracker.phase("generate")
for step in range(3):
    tracker.log(step, {"reward/mean": step / 4})
tracker.message("a message [not markup]")
time.sleep(0.6)
tracker.close()
"""


@pytest.fixture
def plain(tmp_path):
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=False)
    return ConsoleTracker(Choice(name="console"), RunInfo(tmp_path, total_steps=3), console), out


def shown(tracker, width=100):
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=True, color_system=None).print(tracker.render())
    return out.getvalue()


def test_without_a_terminal_each_step_is_a_plain_line(plain):
    tracker, out = plain
    tracker.log(1, VALUES)
    tracker.log(2, {"reward/mean": 0.6})  # too soon after the last line
    tracker.log(3, {"reward/mean": 0.75})  # the last step is always shown
    tracker.message("saved [not markup]")
    tracker.close()
    first, last, message = out.getvalue().splitlines()
    figures = "reward 0.531  exact match 0.250  response length 18.2  tokens/s 4,321  step time 1.50 s"
    assert first.startswith(f"step 1/3  {figures}  0:00:0")
    assert first.endswith("left")
    assert last.startswith("step 3/3  reward 0.750  0:00:00 left")
    assert message == "saved [not markup]"
    assert "\x1b" not in out.getvalue()


def test_an_evaluation_is_always_shown(plain):
    tracker, out = plain
    tracker.log(1, {"reward/mean": 0.1})
    tracker.log(2, {"eval/sort/exact_match": 0.25})
    assert "exact match 0.250" in out.getvalue().splitlines()[1]


def test_the_display_has_figures_progress_phase_and_a_sample(plain):
    tracker, _ = plain
    for step in (1, 2):
        tracker.log(step, {**VALUES, "reward/mean": 0.25 * step})
    tracker.rollouts(2, [
        {"prompt": "sort 3 1", "response": "1\n3", "reward": 0.5},
        {"prompt": "<|im_start|>user\nsort 2<|im_end|>\n<|im_start|>assistant\n", "response": "[b]2[/b]", "reward": 1},
        {"prompt": "sort 9", "response": "9", "reward": None},
    ])  # fmt: skip
    tracker.phase("backward")
    text = shown(tracker)
    assert "step 2 of 3" in text
    assert re.search(r"backward  \d:\d\d:\d\d left", text)
    assert re.search(r"reward\s+0\.500\s+▁█", text)
    assert re.search(r"exact match\s+0\.250", text)
    assert re.search(r"asked\s+sort 2\s*│?$", text, flags=re.M)
    assert re.search(r"answered  \[b\]2\[/b\]\s+reward 1", text)
    assert max(map(len, text.splitlines())) <= 100


def test_long_and_wide_texts_fit_the_display(plain):
    tracker, _ = plain
    tracker.rollouts(1, [{"prompt": "漢字 " * 500 + "the question?", "response": "y\n" * 2000, "reward": -1.0}])
    tracker._console.width = 60
    lines = shown(tracker, width=60).splitlines()
    assert len(lines) <= 6
    assert any("the question?" in line for line in lines)


def test_time_left_follows_the_pace_of_the_last_steps(plain):
    tracker, _ = plain
    assert tracker.seconds_left() is None
    now = time.monotonic()
    tracker._ends.extend([now - 40, now - 20, now])
    tracker._ends.popleft()
    tracker._step = 1
    assert tracker.seconds_left() == pytest.approx(40, abs=5)


def test_a_run_of_unknown_length_shows_time_so_far(tmp_path):
    tracker = ConsoleTracker(Choice(name="console"), RunInfo(tmp_path), Console(file=io.StringIO(), width=80))
    tracker.log(7, {})
    assert "step 7" in shown(tracker)
    assert "so far" in shown(tracker)


def test_sparkline():
    assert sparkline([1.0], 10) == ""
    assert sparkline([2.0, 2.0], 10) == "▁▁"
    assert sparkline([0.0, 7.0], 10) == "▁█"
    assert sparkline(list(range(100)), 4) == "▁▃▆█"


def test_on_a_real_terminal_messages_scroll_above_the_display():
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "90", "LINES": "30"}
    process = subprocess.Popen([sys.executable, "-c", ON_A_TERMINAL], stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    said = b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not select.select([ours], [], [], 1.0)[0]:
            continue
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        said += piece
    os.close(ours)
    assert process.wait(10) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.decode())
    assert "sorting" in text
    assert "step 2 of 9" in text
    assert "generate" in text
    assert text.index("a message [not markup]") < text.rindex("╰")
    assert b"\x1b[?25h" in said  # the cursor is given back
