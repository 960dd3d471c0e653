"""vLLM on two machines of a Ray cluster: a short run whose weights reach both by broadcast, and one server on both."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from hone.config import load
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run.context import RunControl
from hone.trainers.run.launch import run_policy
from tests.runtime.machines import SECOND, Machines
from tests.trainers.tiny import BASE, metrics, recipe

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture
def machines():
    found = Machines(SECOND)
    yield found
    found.end()


ENGINE = {"kv_cache_memory_bytes": 2**26, "max_num_seqs": 64}
SHAPES = {  # of the servers: replicas, tensor parallel, options; and their logs
    "a server on each": (2, 1, {}, ["vllm-0.log", "vllm-1.log"]),
    "layers on both": (1, 1, {"pipeline_parallel_size": 2}, ["vllm-0.1.log", "vllm-0.log"]),
    "parts of layers on both": (1, 2, {}, ["vllm-0.1.log", "vllm-0.log"]),
}


@pytest.fixture
def train(machines, real_python, tmp_path):
    """`train(shape, steps, on_step)`: the metrics of a run with servers of this shape."""

    def run(shape, steps=2, on_step=None):
        replicas, tensor_parallel, options, _ = SHAPES[shape]
        rollout = {
            "backend": "vllm",
            "replicas": replicas,
            "tensor_parallel": tensor_parallel,
            "python": str(real_python("vllm")),
            "engine": {**ENGINE, **options},
            "sampling": {"max_response_tokens": 3},
            "start_timeout_s": 280,
        }
        build = {**BASE["model"]["build"], "layers": 2, "hidden_size": 64}  # vLLM's smallest head on a CPU
        sections = {"rollout": rollout, "run": {"steps": steps}, "weights": {"verify": "probe"}}
        path = recipe(tmp_path, {"model": {"build": build}}, sections)
        pool = [f"runtime.backend.pools.rollout.{name}" for name in ("nodes=2", "devices=1")]
        given = ["runtime.backend=ray", f"runtime.backend.address={machines.address}", *pool]
        run_policy(load(PolicyRunConfig, path, given), RunControl(on_step=on_step))
        rows = metrics(tmp_path / "run")
        assert max(row["correction/max_abs_difference"] for row in rows[1:]) < 1e-4
        assert max(row["correction/probe_max_abs_difference"] for row in rows[1:]) < 1e-4
        return rows

    return run


@pytest.mark.parametrize("shape", SHAPES)
def test_a_run_on_two_machines_samples_what_the_trainer_computes(train, tmp_path, shape):
    replicas, *_, logs = SHAPES[shape]
    assert [row["weights/replicas"] for row in train(shape)[1:]] == [replicas, replicas]
    assert sorted(os.listdir(tmp_path / "run" / "servers")) == logs


def followers(folder):
    """Process ids of the second machine's part of a server whose model is in `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (process / "cmdline").read_bytes()
            if b"vllm_follower" in command and str(folder).encode() in command and b"supervisor.py" not in command:
                found.append(int(process.name))
    return found


def test_a_death_on_the_second_machine_is_that_of_the_server_which_is_started_again(train, tmp_path):
    seen = []

    def kill(step, figures):
        seen.append(followers(tmp_path))
        if step == 1:
            os.kill(seen[-1][0], signal.SIGKILL)

    rows = train("layers on both", steps=3, on_step=kill)
    assert sum(row["rollout/replica_restarts"] for row in rows[1:]) == 1
    assert all(seen)
    assert not set(seen[1]) & set(seen[-1]), "another process"
    assert followers(tmp_path) == []
