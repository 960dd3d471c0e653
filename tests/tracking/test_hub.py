"""The hub: everyone is told, a broken tracker is switched off and seen to be, the record is not."""

import json
import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from hone.composition import Layer
from hone.config import ConfigError, build, load_layers, unread
from hone.registry import Entry
from hone.tracking import TRACKERS
from hone.tracking.base import Interrupted, RunInfo, Tracker, TrackingError
from hone.tracking.facts import RUN_FILE
from hone.tracking.hub import Tracking
from hone.tracking.report.build import build_report
from hone.tracking.rollouts import OfTrainer
from hone.tracking.settings import TrackerSettings, TrackingConfig
from hone.tracking.trackers.jsonl import METRICS_FILE, ROLLOUTS_FILE, read_metrics
from hone.types import Status

from .conftest import decode


class Recording(Tracker):
    """Keeps what it is told."""

    seen = []  # noqa: RUF012 (emptied by each test)

    def __init__(self, settings, run):
        self.where = "memory"
        self.seen.clear()

    def log(self, step, values):
        self.seen.append((step, dict(values)))

    def rollouts(self, step, records):
        self.seen.append((step, [record["response"] for record in records]))

    def flush(self):
        self.seen.append("flushed")

    def close(self, outcome):
        self.seen.append(outcome)


class Broken(Tracker):
    """Works for two steps."""

    def __init__(self, settings, run):
        pass

    def log(self, step, values):
        if step >= 2:
            raise ConnectionError("no route\nto host")


class Unstartable(Tracker):
    def __init__(self, settings, run):
        raise PermissionError("not logged in")


class Stuck(Tracker):
    """Never comes back from its first step, until the test is over."""

    free = threading.Event()

    def __init__(self, settings, run):
        self.free.clear()

    def log(self, step, values):
        self.free.wait(30)


class Late(Recording):
    """Writes nothing until it is free."""

    free = threading.Event()

    def __init__(self, settings, run):
        super().__init__(settings, run)
        self.free.clear()

    def log(self, step, values):
        assert self.free.wait(30)
        super().log(step, values)


class Slow(Recording):
    """Each step takes a while."""

    def log(self, step, values):
        time.sleep(0.3)
        super().log(step, values)


class Exiting(Tracker):
    """Has a path, takes figures away, and leaves at its second step, as a login that asks in vain does."""

    def __init__(self, settings, run):
        self.where = run.run_dir / "elsewhere"

    def log(self, step, values):
        values.clear()
        if step >= 2:
            sys.exit(0)


class BrokenConsole(Broken):
    own_thread = False

    def message(self, text):
        raise BrokenPipeError("nobody reads")


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts a Tracking with the trackers named, at the step given; everything is closed afterwards."""
    for cls in (Recording, Broken, Exiting, Late, Slow, Unstartable, Stuck):
        monkeypatch.setitem(TRACKERS._entries, cls.__name__.lower(), Entry(cls, TrackerSettings))
    opened = []

    def make(*trackers, at=0, **settings):
        config = build(TrackingConfig, {"trackers": list(trackers), **settings}, source="test")
        hub = Tracking(config, RunInfo(tmp_path, total_steps=9), decode)
        opened.append(hub)
        hub.begin(at)
        return hub

    yield make
    Stuck.free.set()
    Late.free.set()
    for hub in opened:
        hub.close()


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "nothing happened within 10 s"
        time.sleep(0.005)


def test_a_step_and_its_rollouts_reach_every_tracker(start, tmp_path, group, lines):
    hub = start("jsonl", "recording")
    hub.rollouts(1, [group((3,), (4,))], {(0, 1): OfTrainer((0.0, 0.0, -0.75))})
    hub.evaluated(1, "held_out", [group((5, 6))])
    hub.log(1, {"reward/mean": 0.5})
    hub.flush()
    hub.close()
    assert Recording.seen[:2] == [(1, [" 3", " 1"]), (1, ["\n</script>"])]
    assert Recording.seen[2:] == [(1, {"reward/mean": 0.5}), "flushed", "finished"]
    assert lines(tmp_path / METRICS_FILE) == [{"step": 1, "reward/mean": 0.5}]
    first, second, third = lines(tmp_path / ROLLOUTS_FILE)
    assert (first["step"], first["set"], first["logprob_gap"]) == (1, None, None)
    assert (second["response"], second["logprob_gap"]) == (" 1", [-0.25])
    assert (third["set"], third["tokens"]) == ("held_out", ["\n", "</script>"])


@pytest.mark.parametrize(("setting", "kept"), [(0, []), (2, [0, 3]), ("all", [0, 1, 2, 3])])
def test_as_many_rollouts_as_the_settings_say(start, tmp_path, group, lines, setting, kept):
    hub = start("jsonl", rollouts_per_step=setting)
    hub.rollouts(1, [group((3,), (4,), (5,), (6,), status=Status.TRUNCATED)])
    assert [record["sample"] for record in lines(tmp_path / ROLLOUTS_FILE)] == kept


def test_the_limit_of_rollouts_is_said_once_and_what_is_left_out_is_counted(start, tmp_path, group, lines, capsys):
    """Two answers with 200 KiB of noise each: two steps fit into 1 MiB, the third does not; small ones still do."""
    noise = random.Random(0)

    def large():
        made = group((3,), (4,))
        return replace(
            made, trajectories=tuple(replace(one, error=noise.randbytes(200 * 1024).hex()) for one in made.trajectories)
        )

    hub = start({"name": "jsonl", "rollouts_max_mib": 1})
    for step in range(1, 6):
        hub.rollouts(step, [large()])
        hub.evaluated(step, "held_out", [group((3,), (4,), (5,))])
        hub.log(step, {})
    hub.close()
    written = [(record["step"], record["set"]) for record in lines(tmp_path / ROLLOUTS_FILE)]
    held_out = [(step, "held_out") for step in range(1, 6) for _ in range(3)]
    assert sorted(written, key=str) == sorted([(1, None), (1, None), (2, None), (2, None), *held_out], key=str)
    assert [step.get("perf/rollouts_left_out") for step in read_metrics(tmp_path)] == [None, None, 2.0, 2.0, 2.0]
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "limit" in line]
    assert said.startswith(f"warning: {tmp_path / ROLLOUTS_FILE} has reached its limit, rollouts_max_mib = 1: ")
    assert "rollouts from step 3 on are left out unless they still fit" in said
    page = build_report(tmp_path).read_text()
    assert f"{ROLLOUTS_FILE} reached its limit (rollouts_max_mib of the tracker jsonl) in step 3: it keeps" in page
    assert "and 6 later ones are not in it" in page


def test_the_settings_of_a_tracker_are_used(tmp_path):
    """They are read when the run begins, which is after the check for keys that no part uses."""
    loaded = load_layers(TrackingConfig, [Layer("run.yaml", {"trackers": [{"name": "jsonl", "rollouts_max_mib": 5}]})])
    assert unread(loaded) == ["trackers.0.rollouts_max_mib"]
    Tracking(loaded.config, RunInfo(tmp_path))
    assert unread(loaded) == ["trackers.0.rollouts_max_mib"]  # a run without `decode` writes no rollouts
    Tracking(loaded.config, RunInfo(tmp_path), decode=str)
    assert unread(loaded) == []


def test_a_step_is_logged_once(start):
    hub = start("jsonl")
    hub.log(1, {})
    with pytest.raises(ValueError, match="step 1 was logged after step 1"):
        hub.log(1, {})


def test_resuming_continues_after_the_step_of_the_checkpoint(start, tmp_path, lines, capsys):
    hub = start("jsonl")
    for step in range(5):
        hub.log(step, {"reward/mean": float(step)})
    hub.close()
    hub = start("jsonl", at=2)
    with pytest.raises(ValueError, match="step 2 was logged after step 2"):
        hub.log(2, {})
    hub.log(3, {"reward/mean": 30.0})
    assert [step["reward/mean"] for step in lines(tmp_path / METRICS_FILE)] == [0.0, 1.0, 2.0, 30.0]
    assert capsys.readouterr().err == ""
    assert json.loads((tmp_path / RUN_FILE).read_text())["resumed_from"] == 2


def test_a_record_that_ends_too_early_is_said(start, capsys):
    hub = start("jsonl")
    hub.log(0, {})
    hub.close()
    start("jsonl", at=4)
    assert "ends at step 0, but the run resumes after step 4: it lacks the steps in between" in capsys.readouterr().err


def test_a_tracker_that_breaks_is_switched_off_said_and_counted(start, tmp_path, capsys):
    hub = start("jsonl", "broken", "recording")
    for step in range(1, 4):
        hub.log(step, {"reward/mean": 0.5})
    wait_for(lambda: hub._trackers.get("broken") is None or hub._trackers["broken"]._error is not None)
    hub.log(4, {})
    hub.log(5, {})
    hub.close()
    said = capsys.readouterr().err
    assert said.count("tracker 'broken' failed: ConnectionError: no route to host; it is switched off") == 1
    last = read_metrics(tmp_path)[-1]
    assert (last["step"], last["perf/trackers_failed"]) == (5, 1.0)
    assert [entry[0] for entry in Recording.seen[:-1]] == [1, 2, 3, 4, 5]


def test_a_tracker_that_exits_is_switched_off_too(start, tmp_path, capsys):
    hub = start("jsonl", "exiting", "recording")
    hub.log(1, {"reward/mean": 0.5})
    hub.log(2, {"reward/mean": 0.5})
    assert json.loads((tmp_path / RUN_FILE).read_text())["trackers"]["exiting"] == str(tmp_path / "elsewhere")
    hub.close()
    assert "tracker 'exiting' failed: SystemExit: 0; it is switched off" in capsys.readouterr().err
    assert Recording.seen == [(1, {"reward/mean": 0.5}), (2, {"reward/mean": 0.5}), "finished"]
    assert [step["reward/mean"] for step in read_metrics(tmp_path)] == [0.5, 0.5]


def test_a_tracker_that_does_not_answer_is_switched_off(start, tmp_path, capsys):
    hub = start("jsonl", {"name": "stuck", "timeout_s": 0.05})
    hub.log(1, {})
    time.sleep(0.1)
    hub.log(2, {})
    hub.log(3, {})
    assert "tracker 'stuck' has not answered for 0.05 s; it is switched off" in capsys.readouterr().err
    assert read_metrics(tmp_path)[-1]["perf/trackers_failed"] == 1.0


def test_a_flush_waits_until_all_of_it_is_written(start):
    hub = start("jsonl", "late")
    for step in (1, 2, 3):
        hub.log(step, {})
    threading.Timer(0.1, Late.free.set).start()  # a flush that does not wait is back by then
    hub.flush()
    assert [seen if isinstance(seen, str) else seen[0] for seen in Late.seen] == [1, 2, 3, "flushed"]


def test_a_flush_waits_for_a_tracker_that_goes_on_longer_than_one_call_may_take(start):
    hub = start("jsonl", {"name": "slow", "timeout_s": 1.0})
    for step in range(1, 6):
        hub.log(step, {})
    hub.flush()
    assert len(Slow.seen) == 6
    assert set(hub._trackers) == {"jsonl", "slow"}


def test_a_tracker_that_is_not_flushed_in_time_or_fails_then_is_switched_off(start, capsys):
    hub = start("jsonl", {"name": "stuck", "timeout_s": 0.05}, "broken")
    hub.log(1, {})
    hub.log(2, {})
    hub.flush()
    said = capsys.readouterr().err
    assert "tracker 'stuck' has not answered for 0.05 s, before a checkpoint; it is switched" in said
    assert "tracker 'broken' failed: ConnectionError: no route to host; it is switched off" in said
    assert set(hub._trackers) == {"jsonl"}


def test_closing_waits_no_longer_than_the_deadline(start, capsys):
    hub = start("jsonl", {"name": "stuck", "timeout_s": 0.05})
    hub.log(1, {})
    hub.close()
    assert "tracker 'stuck' did not finish within 0.05 s" in capsys.readouterr().err


def test_a_tracker_that_does_not_start_is_an_error_only_where_the_run_starts(start, capsys):
    with pytest.raises(TrackingError, match="tracker 'unstartable' failed: PermissionError: not logged in"):
        start("jsonl", "unstartable")
    hub = start("jsonl", "unstartable", at=3)
    hub.log(4, {})
    assert "tracker 'unstartable' failed: PermissionError: not logged in; it is switched off" in capsys.readouterr().err


def test_a_console_that_is_gone_stops_nothing(start, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(TRACKERS._entries, "console", Entry(BrokenConsole))
    hub = start("jsonl", "console")
    hub.log(1, {})
    hub.log(2, {})
    hub.message("on")
    hub.log(3, {})
    assert [step["step"] for step in read_metrics(tmp_path)] == [1, 2, 3]
    assert capsys.readouterr().err.splitlines() == [
        "tracker 'console' failed: ConnectionError: no route to host; it is switched off, and the run continues",
        "on",
    ]


def test_a_record_that_cannot_be_written_ends_the_run(start, tmp_path):
    hub = start("jsonl", "recording")
    os.close(hub._trackers["jsonl"]._metrics._fd)
    with pytest.raises(TrackingError, match=r"cannot write .*metrics\.jsonl: Bad file descriptor; the run stops"):
        hub.log(1, {})
    hub._trackers.pop("jsonl")


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio", "tensorboard"])
def test_a_missing_library_is_said_at_the_start(name, monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, f"hone.tracking.trackers.{name}", raising=False)  # another test may have it
    monkeypatch.setitem(sys.modules, name, None)  # what Python itself uses for "cannot be imported"
    for module in [module for module in sys.modules if module.startswith(f"{name}.")]:
        monkeypatch.delitem(sys.modules, module)
    config = build(TrackingConfig, {"trackers": [name]}, source="test")
    with pytest.raises(ConfigError, match=rf"tracker '{name}' .*pip install '{name}.*>="):
        Tracking(config, RunInfo(tmp_path))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trackers": ["consol"]}, "unknown tracker 'consol'; did you mean 'console'?"),
        ({"trackers": ["jsonl", "jsonl"]}, "jsonl is listed more than once"),
        ({"rollouts_per_step": -1}, "rollouts_per_step"),
        ({"trackers": [{"name": "wandb", "projct": "x"}]}, "did you mean 'trackers.0.project'?"),
    ],
)
def test_settings_that_cannot_be_meant(settings, message):
    with pytest.raises(ConfigError) as caught:
        build(TrackingConfig, settings, source="test")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "finished"),
        (KeyboardInterrupt(), "interrupted"),
        (Interrupted(3), "interrupted"),
        (SystemExit(143), "interrupted"),
        (SystemExit(1), "failed: SystemExit: 1"),
        (OSError("disk\ngone"), "failed: OSError: disk gone"),
    ],
)
def test_the_end_of_a_run_is_written_down(start, tmp_path, error, outcome):
    hub = start("jsonl")
    if error is None:
        with hub:
            assert json.loads((tmp_path / RUN_FILE).read_text())["outcome"] is None
    else:
        with pytest.raises(type(error)), hub:
            raise error
    facts = json.loads((tmp_path / RUN_FILE).read_text())
    assert (facts["outcome"], facts["total_steps"]) == (outcome, 9)
    assert facts["trackers"] == {"jsonl": str(tmp_path / METRICS_FILE)}


def test_settings_and_hub_import_nothing_heavy():
    code = (
        "import sys, hone.tracking.settings, hone.tracking.hub, hone.tracking.report.build;"
        "print([n for n in ('torch', 'numpy', 'transformers', 'tensorboard', 'wandb', 'mlflow') if n in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
