"""The record of a run: exact numbers, whole lines, and a resumed file that equals the uninterrupted one."""

import errno
import json
import math
import os
import signal
import subprocess
import sys

import pytest

from hone import full_disk
from hone.config import Choice
from hone.tracking.base import RunInfo, TrackingError
from hone.tracking.trackers.jsonl import METRICS_FILE, ROLLOUTS_FILE, JsonlTracker, read_metrics, rollout_lines

SETTINGS = Choice(name="jsonl")

# A run that can be killed: 40 steps, a "checkpoint" every 7; it continues from its checkpoint.
RUN = """
import os, random, sys, time
from pathlib import Path
from hone.config import Choice
from hone.tracking.base import RunInfo
from hone.tracking.trackers.jsonl import JsonlTracker

folder, slow = Path(sys.argv[1]), len(sys.argv) > 2
folder.mkdir(exist_ok=True)
saved = folder / "checkpoint"
step = int(saved.read_text()) if saved.exists() else 0
tracker = JsonlTracker(Choice(name="jsonl"), RunInfo(folder, resumed_from=step or None))
while step < 40:
    step += 1
    number = random.Random(step)
    tracker.rollouts(step, [{"step": step, "response": "x" * number.randrange(3000)} for _ in range(3)])
    tracker.log(step, {"reward/mean": number.random(), "train/kl": number.random() * 1e-9})
    if step % 7 == 0:
        tracker.flush()
        (folder / "new").write_text(str(step))
        os.replace(folder / "new", saved)
    if slow:
        print(step, flush=True)
        time.sleep(0.002)
tracker.close()
"""

# A disk that is full: the process may not write files beyond the size given.
FULL_DISK = """
import resource, sys
from pathlib import Path
from hone.config import Choice
from hone.tracking.base import RunInfo, TrackingError
from hone.tracking.trackers.jsonl import JsonlTracker

tracker = JsonlTracker(Choice(name="jsonl"), RunInfo(Path(sys.argv[1])))
resource.setrlimit(resource.RLIMIT_FSIZE, (120, 120))
try:
    for step in range(10):
        tracker.log(step, {"reward/mean": 1 / 3})
except TrackingError as error:
    print(step, error)
"""


def run_python(code, *arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True, **options
    )


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    with run_python(RUN, folder) as process:
        assert process.wait(60) == 0
    return folder


def write(folder, *steps, resumed_from=None):
    tracker = JsonlTracker(SETTINGS, RunInfo(folder, resumed_from=resumed_from))
    for step in steps:
        tracker.rollouts(step, [{"step": step, "sample": sample} for sample in range(2)])
        tracker.log(step, {"reward/mean": step / 7})
    tracker.close()


def steps_of(path):
    lines = rollout_lines(path) if path.name == ROLLOUTS_FILE else path.read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_numbers_keep_every_digit_and_keys_an_order(tmp_path):
    values = {"train/b": 0.1 + 0.2, "train/a": 1e-300, "eval/sort/exact_match": 1 / 3}
    tracker = JsonlTracker(SETTINGS, RunInfo(tmp_path))
    tracker.log(3, values)
    tracker.close()
    line = (tmp_path / METRICS_FILE).read_text()
    assert line == (
        '{"step": 3, "eval/sort/exact_match": 0.3333333333333333, "train/a": 1e-300, "train/b": 0.30000000000000004}\n'
    )
    assert read_metrics(tmp_path) == [{"step": 3, **values}]


def test_what_is_not_finite_is_valid_json_and_comes_back(tmp_path):
    tracker = JsonlTracker(SETTINGS, RunInfo(tmp_path))
    tracker.log(0, {"a/nan": math.nan, "b/up": math.inf, "c/down": -math.inf, "d/x": 1.5})
    tracker.close()
    text = (tmp_path / METRICS_FILE).read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "step": 0, "a/nan": "NaN", "b/up": "Infinity", "c/down": "-Infinity", "d/x": 1.5,
    }  # fmt: skip
    (step,) = read_metrics(tmp_path)
    assert math.isnan(step["a/nan"])
    assert (step["b/up"], step["c/down"], step["d/x"]) == (math.inf, -math.inf, 1.5)


def test_any_text_can_be_a_rollout(tmp_path):
    text = "line\nbreak \u2028 \ud800 \x00 </script> é 漢"
    tracker = JsonlTracker(SETTINGS, RunInfo(tmp_path))
    tracker.rollouts(1, [{"step": 1, "response": text, "ground_truth": {1, 2}, "reward": math.nan}])
    tracker.close()
    (line,) = rollout_lines(tmp_path / ROLLOUTS_FILE)
    assert json.loads(line) == {
        "step": 1, "response": text.replace("\ud800", "?"), "ground_truth": "{1, 2}", "reward": "NaN",
    }  # fmt: skip


def test_a_run_that_starts_anew_leaves_nothing_of_the_old_one(tmp_path):
    write(tmp_path, 0, 1, 2)
    write(tmp_path, 0)
    assert steps_of(tmp_path / METRICS_FILE) == [0]
    assert steps_of(tmp_path / ROLLOUTS_FILE) == [0, 0]


def test_resuming_cuts_what_will_be_written_again(tmp_path):
    write(tmp_path / "cut", 0, 1, 2, 3, 4)
    write(tmp_path / "cut", 3, 4, 5, resumed_from=2)
    write(tmp_path / "whole", 0, 1, 2, 3, 4, 5)
    for name in (METRICS_FILE, ROLLOUTS_FILE):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("torn", ['{"step": 3, "rew', '{"step": 2, "reward/mean": 0.1}', "{", '{"st'])
def test_a_torn_last_line_is_repaired(tmp_path, torn):
    """Also one that looks whole: without its newline nobody knows whether it is."""
    write(tmp_path, 0, 1)
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write(torn)
    assert [step["step"] for step in read_metrics(tmp_path)] == [0, 1]
    tracker = JsonlTracker(SETTINGS, RunInfo(tmp_path, resumed_from=2))
    assert tracker.last_step == 1
    tracker.log(3, {})
    tracker.close()
    assert steps_of(tmp_path / METRICS_FILE) == [0, 1, 3]


def test_damage_before_the_last_line_is_not_cut_in_silence(tmp_path):
    write(tmp_path, 0, 1, 2)
    path = tmp_path / METRICS_FILE
    path.write_text(path.read_text().replace('{"step": 1,', '{"stp": 1,'))
    with pytest.raises(TrackingError, match=r"metrics\.jsonl line 2 should begin with a step"):
        JsonlTracker(SETTINGS, RunInfo(tmp_path, resumed_from=2))
    with pytest.raises(TrackingError, match=r"metrics\.jsonl line 2 should be an object with an integer 'step'"):
        read_metrics(tmp_path)
    assert len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize("moment", [1, 9, 23])
def test_killed_and_resumed_the_files_equal_the_uninterrupted_ones(tmp_path, uninterrupted, moment):
    killed = run_python(RUN, tmp_path / "killed", "slow")
    while int(killed.stdout.readline()) < moment:
        pass
    killed.send_signal(signal.SIGKILL)
    assert killed.wait(30) == -signal.SIGKILL
    killed.stdout.close()
    with run_python(RUN, tmp_path / "killed") as resumed:
        assert resumed.wait(30) == 0
    for name in (METRICS_FILE, ROLLOUTS_FILE):
        assert (tmp_path / "killed" / name).read_bytes() == (uninterrupted / name).read_bytes()


def test_a_full_disk_is_one_clear_error_and_leaves_whole_lines(tmp_path):
    with run_python(FULL_DISK, tmp_path) as process:
        said = process.stdout.read()
    assert said.startswith("2 cannot write ")
    assert f"{METRICS_FILE}: File too large; the run stops, because its record would have a gap" in said
    assert steps_of(tmp_path / METRICS_FILE) == [0, 1]


def test_a_disk_that_is_full_for_a_moment_costs_nothing(tmp_path, monkeypatch, caplog):
    real, full = os.write, [errno.ENOSPC, errno.EDQUOT]

    def write_a_little(descriptor, data):
        if full:
            raise OSError(full.pop(), "No space left on device")
        return real(descriptor, data[:7])

    monkeypatch.setattr(os, "write", write_a_little)
    write(tmp_path, 1, 2)
    monkeypatch.undo()
    assert [steps_of(tmp_path / name) for name in (METRICS_FILE, ROLLOUTS_FILE)] == [[1, 2], [1, 1, 2, 2]]
    assert caplog.text.count("hone tries again for 120 s") == 1


def test_a_disk_that_stays_full_is_an_error(tmp_path, monkeypatch):
    def write_nothing(descriptor, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(full_disk, "PATIENCE_S", 0.3)
    monkeypatch.setattr(os, "write", write_nothing)
    with pytest.raises(TrackingError, match=r"No space left on device; the run stops"):
        write(tmp_path, 1)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrackingError, match=r"cannot open .*file/run/metrics\.jsonl: Not a directory"):
        JsonlTracker(SETTINGS, RunInfo(tmp_path / "file" / "run"))


def test_every_step_is_in_the_file_as_soon_as_it_is_logged(tmp_path):
    tracker = JsonlTracker(SETTINGS, RunInfo(tmp_path))
    tracker.log(0, {"reward/mean": 0.5})
    assert os.path.getsize(tmp_path / METRICS_FILE) == len('{"step": 0, "reward/mean": 0.5}\n')
    tracker.close()
