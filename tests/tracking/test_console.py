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
from hone.tracking.trackers.console import ConsoleTracker, sparkline

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
from hone.tracking.trackers.console import ConsoleTracker

tracker = ConsoleTracker(Choice(name="console"), RunInfo(Path("sorting"), total_steps=9))
tracker.phase("generate")
for step in range(3):
    tracker.log(step, {"reward/mean": step / 4})
tracker.message("a message [not markup]")
time.sleep(0.6)
tracker.close()
"""


ON_A_PIPE = """
import sys
from pathlib import Path
from hone.config import Choice
from hone.tracking.base import RunInfo
from hone.tracking.trackers.console import ConsoleTracker

tracker = ConsoleTracker(Choice(name="console"), RunInfo(Path("sorting"), total_steps=3))
tracker.log(1, {"reward/mean": 0.5, "eval/a/reward": 0.5})
sys.stdin.readline()
for step in (2, 3):
    tracker.log(step, {"reward/mean": 0.5, "eval/a/reward": 0.5})
    tracker.message("nobody reads this")
tracker.close()
print("nor this")
sys.stderr.write("done")
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


def test_the_name_of_a_set_is_no_markup(plain):
    tracker, _ = plain
    tracker.log(1, {"eval/sums [red]/reward": 0.5})
    assert "sums [red] reward" in shown(tracker)


def test_without_a_terminal_each_step_is_a_plain_line(plain):
    tracker, out = plain
    tracker.log(1, VALUES)
    tracker.log(2, {"reward/mean": 0.6})  # too soon after the last line
    tracker.log(3, {"reward/mean": 0.75})  # the last step is always shown
    tracker.message("saved [not markup]")
    tracker.close()
    first, last, message = out.getvalue().splitlines()
    figures = "reward 0.531  response length 18.2  tokens/s 4,321  step time 1.50 s"
    assert first.startswith(f"step 1/3  {figures}  sort exact match 0.250 (step 1)  0:00:0")
    assert first.endswith("left")
    # a held-out figure keeps its name and the step that it is of
    assert last.startswith("step 3/3  reward 0.750  sort exact match 0.250 (step 1)  0:00:00 left")
    assert message == "saved [not markup]"
    assert "\x1b" not in out.getvalue()


def test_an_evaluation_is_always_shown(plain):
    tracker, out = plain
    tracker.log(1, {"reward/mean": 0.1})
    tracker.log(2, {"eval/sort/exact_match": 0.25})
    assert "sort exact match 0.250 (step 2)" in out.getvalue().splitlines()[1]


@pytest.mark.parametrize(("values", "figures"), [
    # a training figure is never called a held-out one, nor another metric exact match
    ({"reward/exact_match": 0.7, "train/loss": 0.5, "train/policy_loss": -0.25}, "policy loss -0.2500"),
    ({"reward/mean": 0.0, "train/teacher_kl": 0.125}, "teacher KL 0.1250  reward 0.000"),
    ({"train/loss": 2.5, "eval/val/loss": 3.5}, "loss 2.5000  val loss 3.5000 (step 2)"),
    ({"eval/val/reward": 0.5, "eval/val/failed": 0.0}, "val reward 0.500 (step 2)"),
    ({"eval/pairs/accuracy": 0.75, "eval/pairs/loss": 0.5, "train/preference_accuracy": 1.0},
     "pair accuracy 1.000  pairs accuracy 0.750 (step 2)"),
])  # fmt: skip
def test_a_figure_has_one_name(plain, values, figures):
    tracker, out = plain
    tracker.log(2, values)
    assert re.fullmatch(rf"step 2/3  {re.escape(figures)}  0:00:\d\d left\n", out.getvalue())


def failed(status, error):
    return {"set": None, "status": status, "error": error, "prompt": "p", "response": "r", "reward": None}


def test_failures_are_on_the_line_in_red_with_their_first_cause(tmp_path):
    out = io.StringIO()
    console = Console(file=out, width=200, force_terminal=True, color_system="standard", legacy_windows=False)
    tracker = ConsoleTracker(Choice(name="console"), RunInfo(tmp_path, total_steps=9), console)
    tracker._live.stop()
    tracker._live = None
    tracker.rollouts(1, [failed("env_failed", "no tool"), failed("reward_failed", "no answer\nwithin 5 s")])
    tracker.rollouts(1, [failed("reward_failed", "another"), {**failed("engine_failed", "x"), "set": "test"}])
    counts = {"ok": 7.0, "reward_failed": 56.0, "env_failed": 1.0, "engine_failed": 0.0}
    status = {f"rollout/status/{name}": value for name, value in counts.items()}
    tracker.log(1, {"reward/mean": 1.0, **status})
    line = out.getvalue().splitlines()[-1]
    assert "\x1b[1;31m  57 of 64 answers failed (reward_failed: no answer within 5 s)\x1b[0m" in line
    assert "57 of 64 answers failed" in shown(tracker)
    tracker.log(2, {"reward/mean": 1.0, "rollout/status/ok": 64.0, "rollout/status/reward_failed": 0.0})
    assert "failed" not in out.getvalue().splitlines()[-1].removeprefix(line)
    assert "failed" not in shown(tracker)


def test_the_display_has_figures_progress_phase_and_a_sample(plain):
    tracker, _ = plain
    for step in (1, 2):
        tracker.log(step, {**VALUES, "reward/mean": 0.25 * step})
    tracker.rollouts(2, [
        {"prompt": "sort 3 1", "response": "1\n3", "reward": 0.5},
        {"prompt": "sort 1", "response": "7", "reward": 0.0},
        {"prompt": "<|im_start|>user\nsort 2<|im_end|>\n<|im_start|>assistant\n", "response": "[b]2[/b]", "reward": 1},
        failed("reward_failed", "no answer"),
    ])  # fmt: skip
    tracker.phase("backward")
    text = shown(tracker)
    assert "step 2 of 3" in text
    assert re.search(r"backward  \d:\d\d:\d\d left", text)
    assert re.search(r"reward\s+0\.500\s+▁█", text)
    assert re.search(r"sort exact match\s+0\.250 \(step 2\)", text)
    assert re.search(r"prompt\s+sort 2\s*│?$", text, flags=re.M)  # one of the answers, another in each step
    assert re.search(r"^│ answer\s+\[b\]2\[/b\]\s+reward 1", text, flags=re.M)
    assert re.search(r"worst answer\s+7\s+reward 0", text)
    assert max(map(len, text.splitlines())) <= 100


def test_every_answer_has_its_turn_and_the_worst_is_always_there(plain):
    """Only the best-rewarded one was shown."""
    tracker, _ = plain
    rewards = {"middle": 0.5, "worst": -1.0, "best": 1.0}
    records = [{"prompt": "p", "response": name, "reward": reward} for name, reward in rewards.items()]
    found = []
    for step in (1, 2, 3):
        tracker.rollouts(step, records)
        found.append(re.findall(r"^│ ((?:worst )?answer) +(\w+)  reward", shown(tracker), flags=re.M))
    worst = ("worst answer", "worst")
    assert found == [[("answer", "worst")], [("answer", "best"), worst], [("answer", "middle"), worst]]


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


def test_a_reader_that_goes_away_does_not_end_the_run():
    """As in `hone train run.yaml | head -1`."""
    piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", ON_A_PIPE], **piped) as process:
        assert process.stdout.readline().startswith("step 1/3")
        process.stdout.close()
        process.stdin.write("go on\n")
        process.stdin.close()
        assert process.stderr.read() == "done"
        assert process.wait(60) == 0


def test_a_figure_is_whole_on_a_narrow_terminal(tmp_path):
    """At 80 columns the histories gave their room to nobody, and cut the held-out figures."""
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    tracker = ConsoleTracker(Choice(name="console"), RunInfo(tmp_path, total_steps=2000), console)
    for step in range(60):
        tracker.log(step, {"reward/mean": step / 60, "eval/held_out_questions/exact_match": step / 60})
    text = shown(tracker, width=80)
    assert "held_out_questions exact match" in text
    assert "0.983 (step 59)" in text
    assert max(len(line) for line in text.splitlines()) <= 80
    assert all(len(line) == len(text.splitlines()[0]) for line in text.splitlines()), "the frame is straight"


def test_no_time_left_is_shown_before_a_step_has_ended(plain):
    """The evaluation before training took 2 s, so the display promised an end within 6 s."""
    tracker, out = plain
    tracker.log(0, {"eval/sort/exact_match": 0.25})
    assert tracker.seconds_left() is None
    assert out.getvalue().rstrip().endswith("so far")
    tracker.log(1, {"reward/mean": 0.5, "eval/sort/exact_match": 0.25})
    assert tracker.seconds_left() is not None
