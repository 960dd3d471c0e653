"""vLLM on two machines of a Ray cluster: a short run whose weights reach both by broadcast."""

import os

import pytest

from hone.config import load
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run.launch import run_policy
from tests.runtime.machines import SECOND, Machines
from tests.trainers.tiny import BASE, metrics, recipe

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture
def machines():
    found = Machines(SECOND)
    yield found
    found.end()


def test_a_run_on_two_machines_samples_what_the_trainer_computes(machines, real_python, tmp_path):
    rollout = {
        "backend": "vllm",
        "replicas": 2,
        "python": str(real_python("vllm")),
        "engine": {"kv_cache_memory_bytes": 2**26, "max_num_seqs": 64},
        "sampling": {"max_response_tokens": 3},
        "start_timeout_s": 280,
    }
    wide = {"model": {"build": {**BASE["model"]["build"], "hidden_size": 64}}}  # vLLM's smallest head on a CPU
    path = recipe(tmp_path, wide, {"rollout": rollout, "run": {"steps": 2}, "weights": {"verify": "probe"}})
    pool = [f"runtime.backend.pools.rollout.{name}" for name in ("nodes=2", "devices=1")]
    run_policy(
        load(PolicyRunConfig, path, ["runtime.backend=ray", f"runtime.backend.address={machines.address}", *pool])
    )
    rows = metrics(tmp_path / "run")
    assert [row["weights/replicas"] for row in rows[1:]] == [2, 2]
    assert max(row["correction/max_abs_difference"] for row in rows[1:]) < 1e-4
    assert max(row["correction/probe_max_abs_difference"] for row in rows[1:]) < 1e-4
    assert sorted(os.listdir(tmp_path / "run" / "servers")) == ["vllm-0.log", "vllm-1.log"]
