"""A run whose rollout is a server trains as one whose rollout is inside, and leaves no process behind."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from hone.cli.recipe import load_recipe
from hone.trainers.run.launch import run_policy
from tests.trainers.tiny import BASE, metrics, recipe

STEPS = 24
CHANGES = {
    "update": {"prompts_per_step": 4, "samples_per_prompt": 4, "minibatches": 2},
    "run": {**BASE["run"], "steps": STEPS},
}
SEPARATE = {
    "rollout": {"sampling": {"max_response_tokens": 3}, "builtin": {"process": "separate"}, "start_timeout_s": 120},
    "weights": {"verify": "probe", "timeout_s": 60},
}
ONLY_SERVERS = (
    "weights/buckets",
    "weights/senders",
    "correction/probe_max_abs_difference",
    "rollout/replica",
    "rollout/requests_resent",
)
BY_ARRIVAL = ("rollout/batch_size", "rollout/kv_cache_bytes", "rollout/prefill_tokens", "rollout/shared_prompt_tokens")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("separate")


@pytest.fixture(scope="module")
def inside(folder):
    path = recipe(folder / "inside", CHANGES)
    run_policy(load_recipe(path))
    return metrics(folder / "inside" / "run")


def living(run):
    """Every process that has this run's folder on its command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if str(run) in command and state not in "ZX":
            found.append(f"{entry.name}: {command[:200]}")
    return found


def wait_for(what, seconds, describe):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, describe()
        time.sleep(0.01)


def steps_of(run):
    path = run / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.is_file() else 0


def grown(run, steps, process):
    return steps_of(run) > steps or process.poll() is not None


def launch(path, log):
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "hone", "train", str(path)], stdout=out, stderr=out, cwd=Path(__file__).parents[2]
        )


@pytest.mark.slow
def test_killed_and_interrupted_it_leaves_nothing_behind_and_ends_as_the_run_inside(folder, inside):
    path = recipe(folder / "separate", CHANGES, SEPARATE)
    run, log = folder / "separate" / "run", folder / "log.txt"
    for way, expected in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)):
        begun = steps_of(run)
        process = launch(path, log)
        try:
            wait_for(partial(grown, run, begun + 2, process), 120, log.read_text)
            assert any("hone.workers.inside.builtin" in one for one in living(run)), log.read_text()
            process.send_signal(way)
            assert process.wait(60) == expected, log.read_text()
        finally:
            process.kill()
        wait_for(lambda: not living(run), 20, lambda: "\n".join(living(run)))
        assert steps_of(run) < STEPS, "it was over before the signal came"

    run_policy(load_recipe(path))
    assert living(run) == []
    separate = metrics(run)
    assert (run / "servers" / "builtin-0.log").is_file()
    assert [line["step"] for line in separate] == [line["step"] for line in inside]
    for ours, theirs in zip(separate, inside, strict=True):
        assert theirs.keys() - ours.keys() == set()
        assert all(key.startswith(ONLY_SERVERS) for key in ours.keys() - theirs.keys()), ours.keys() - theirs.keys()
        for key, value in theirs.items():
            if key not in BY_ARRIVAL:
                assert ours[key] == pytest.approx(value, abs=1e-5, rel=1e-5, nan_ok=True), (ours["step"], key)
        if ours["step"]:
            assert ours["correction/max_abs_difference"] < 1e-4
            assert ours["correction/probe_max_abs_difference"] < 1e-4


@pytest.mark.slow
def test_a_broken_run_ends_its_server(folder, monkeypatch):
    """An error in the middle of a run: the reward raises what no reward may, in this process."""
    path = recipe(folder / "broken", {"run": {**BASE["run"], "steps": 2}}, SEPARATE)
    loaded = load_recipe(path)

    def out_of_order(*_, **__):
        raise OSError("the disk is gone")

    monkeypatch.setattr("hone.trainers.policy.trainer.PolicyTrainer.learn", out_of_order)
    with pytest.raises(OSError, match="the disk is gone"):
        run_policy(loaded)
    assert living(folder / "broken" / "run") == []
    assert os.listdir(folder / "broken" / "run" / "servers")
