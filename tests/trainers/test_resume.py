"""A run that was stopped, killed or broken continues to the bits of the uninterrupted run."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from hone.config import load
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run.launch import run_policy
from tests.trainers.tiny import PPO, metrics, recipe


def train(path, *overrides):
    run_policy(load(PolicyRunConfig, path, list(overrides)))


def train_apart(path, *overrides):
    """In a process of its own, without what the tests set for this one."""
    own = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    command = [sys.executable, "-m", "hone", "train", str(path), *overrides]
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]


def weights(run):
    return load_file(run / "export" / "model.safetensors")


def assert_same_run(one, other):
    assert metrics(one) == metrics(other)
    assert (one / "rollouts.jsonl.gz").read_bytes() == (other / "rollouts.jsonl.gz").read_bytes()
    a, b = weights(one), weights(other)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(autouse=True)
def _any_kernel_afterwards():
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("change", [pytest.param({}, marks=pytest.mark.slow, id="grpo"), pytest.param(PPO, id="ppo")])
def test_two_halves_equal_the_whole(tmp_path, change, each_device):
    whole, halves = recipe(tmp_path / "whole", change), recipe(tmp_path / "halves", change)
    start, same = train if each_device == "cpu" else train_apart, "runtime.deterministic=true"
    start(whole, same)
    start(halves, same, "run.steps=4", "actor.schedule.name=constant")
    start(halves, same)
    # Stopping at 4 evaluates at 4, which the whole run does not: that figure is the only difference.
    first, second = metrics(tmp_path / "whole" / "run"), metrics(tmp_path / "halves" / "run")
    assert [m["step"] for m in second] == list(range(7))
    assert [{k: v for k, v in m.items() if not k.startswith("eval/")} for m in first] == [
        {k: v for k, v in m.items() if not k.startswith("eval/")} for m in second
    ]
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            weights(tmp_path / "whole" / "run").values(), weights(tmp_path / "halves" / "run").values(), strict=True
        )
    )


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path):
    for name in "ab":
        train(recipe(tmp_path / name))
    train(recipe(tmp_path / "c", {"run": {"seed": 4}}))
    assert_same_run(tmp_path / "a" / "run", tmp_path / "b" / "run")
    assert metrics(tmp_path / "a" / "run") != metrics(tmp_path / "c" / "run")


def hone(path):
    return [sys.executable, "-m", "hone", "train", str(path)]


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}


def wait_for(condition, process, timeout_s=120.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "the run made no progress"
        time.sleep(0.005)


def lines(run):
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


@pytest.mark.ci
@pytest.mark.slow
def test_kill_9_at_random_moments_changes_nothing(tmp_path):
    steps = {"run": {"steps": 30}, "checkpoint": {"every_steps": 1, "keep": 2}}
    whole, killed = recipe(tmp_path / "whole", steps), recipe(tmp_path / "killed", steps)
    train(whole)
    rng = random.Random(7)
    run = tmp_path / "killed" / "run"
    for kill in range(4):
        process = subprocess.Popen(hone(killed), env=environment(), stderr=subprocess.PIPE, text=True)
        wanted = lines(run) + 3
        wait_for(lambda wanted=wanted: lines(run) >= wanted, process)
        if kill % 2:  # inside a save: the temporary folder is there while one is written
            wait_for(lambda: any(run.glob("checkpoints/.*.partial")), process)
        else:
            time.sleep(rng.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
    subprocess.run(hone(killed), env=environment(), check=True, timeout=120)
    assert_same_run(tmp_path / "whole" / "run", run)


@pytest.mark.ci
@pytest.mark.slow
def test_ctrl_c_finishes_the_step_saves_it_and_loses_nothing(tmp_path):
    change = {"run": {"steps": 40}, "checkpoint": {"every_steps": 1000}}
    whole, stopped = recipe(tmp_path / "whole", change), recipe(tmp_path / "stopped", change)
    train(whole)
    run = tmp_path / "stopped" / "run"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(hone(stopped), env=environment(), **pipes)
    wait_for(lambda: lines(run) >= 4, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    reached = lines(run) - 1
    assert (run / "checkpoints" / f"step_{reached:08d}").is_dir(), (out, err)
    subprocess.run(hone(stopped), env=environment(), check=True, timeout=120)
    assert_same_run(tmp_path / "whole" / "run", run)
