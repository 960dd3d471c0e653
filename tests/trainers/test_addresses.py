"""Runs with servers that were started elsewhere (`hone rollout serve`) equal runs with their own."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from hone.cli.recipe import load_recipe
from hone.processes.child import ServerFailed
from hone.trainers.policy.trainer import PolicyTrainer
from hone.trainers.run.launch import run_policy
from tests.trainers.test_separate_rollout import BY_ARRIVAL
from tests.trainers.tiny import BASE, metrics, recipe

pytestmark = pytest.mark.slow

TOKEN = "0123456789abcdef"
SEPARATE = {"sampling": {"max_response_tokens": 3}, "builtin": {"process": "separate"}, "start_timeout_s": 120}


def changes(*addresses, steps=2):
    there = {"addresses": list(addresses)} if addresses else {}
    return {
        "run": {**BASE["run"], "steps": steps},
        "rollout": {**SEPARATE, **there},
        "evaluation": {},
        "checkpoint": {"every_steps": 9},
        "weights": {"timeout_s": 60},
    }


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """`serve(count)`: processes that serve, each with its address."""
    monkeypatch.setenv("HONE_ROLLOUT_TOKEN", TOKEN)
    started = []

    def start(count):
        for number in range(count):
            path = recipe(tmp_path / f"server{number}", changes())
            command = [sys.executable, "-m", "hone", "rollout", "serve", str(path), "127.0.0.1:0"]
            with (tmp_path / f"serve{number}.log").open("w") as log:
                pipe = subprocess.PIPE
                one = subprocess.Popen(command, stdout=pipe, stderr=log, text=True, cwd=Path(__file__).parents[2])
            started.append(one)
        lines = [one.stdout.readline() for one in started]
        assert all(line.startswith("serving ") for line in lines), (tmp_path / "serve0.log").read_text()
        return [(one, line.split()[-1]) for one, line in zip(started, lines, strict=True)]

    yield start
    for process in started:
        process.terminate()
    for process in started:
        process.wait(30)
        process.stdout.close()


def train(folder, *changed):
    run_policy(load_recipe(recipe(folder, *changed)))
    found = [{name: one for name, one in line.items() if name not in BY_ARRIVAL} for line in metrics(folder / "run")]
    return found, (folder / "run" / "export" / "model.safetensors").read_bytes()


def test_a_run_with_a_server_elsewhere_equals_one_with_its_own(tmp_path, serve):
    """Twice with the same server: the first run leaves nothing behind. Weights come by memory, then by the network."""
    expected = train(tmp_path / "own", changes())
    ((process, address),) = serve(1)
    for name in ("ipc", "collective"):
        transport = {"weights": {"timeout_s": 60, "transport": name}}
        assert train(tmp_path / name, changes(address), transport) == expected
    assert process.poll() is None
    other = {"model": {"build": {**BASE["model"]["build"], "hidden_size": 64}}}
    with pytest.raises(ServerFailed, match="model is another: its head_dim is 16 there and 32 here"):
        train(tmp_path / "other", changes(address), other)


def test_a_server_that_is_lost_is_named_and_the_run_goes_on(tmp_path, serve, monkeypatch, caplog):
    (kept, first), (lost, second) = serve(2)
    step = PolicyTrainer.step

    def and_kill(trainer, number):
        step(trainer, number)
        if number == 1:
            lost.kill()
            lost.wait(30)

    monkeypatch.setattr(PolicyTrainer, "step", and_kill)
    with caplog.at_level(logging.WARNING):
        found, _ = train(tmp_path / "run", changes(first, second, steps=3))
    assert [line["rollout/replicas_serving"] for line in found if "rollout/replicas_serving" in line][-1] == 1
    assert f"rollout replica builtin-1@{second} is lost" in caplog.text
    assert f"goes on without it. Left: builtin-0@{first}" in caplog.text
    assert kept.poll() is None
