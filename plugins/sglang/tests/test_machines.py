"""One SGLang server on two machines of a Ray cluster: a short run whose weights reach the ranks on both."""

import os

import pytest

from hone.config import load
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run.launch import run_policy
from tests.runtime.machines import SECOND, Machines
from tests.trainers.tiny import metrics, recipe

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


@pytest.fixture
def machines():
    found = Machines(SECOND)
    yield found
    found.end()


def test_a_server_on_two_machines_samples_what_the_trainer_computes(machines, real_python, tmp_path):
    rollout = {
        "backend": "sglang",
        "tensor_parallel": 2,
        "python": str(real_python("sglang")),
        "engine": {"max_total_tokens": 8192, "max_running_requests": 64},
        "sampling": {"max_response_tokens": 3},
        "start_timeout_s": 400,
    }
    path = recipe(tmp_path, {"rollout": rollout, "run": {"steps": 2}, "weights": {"verify": "probe"}})
    pool = [f"runtime.backend.pools.rollout.{name}" for name in ("nodes=2", "devices=1")]
    given = ["runtime.backend=ray", f"runtime.backend.address={machines.address}", *pool]
    run_policy(load(PolicyRunConfig, path, given))
    rows = metrics(tmp_path / "run")
    assert max(row["correction/max_abs_difference"] for row in rows[1:]) < 1e-4
    assert max(row["correction/probe_max_abs_difference"] for row in rows[1:]) < 1e-4
    assert sorted(os.listdir(tmp_path / "run" / "servers")) == ["sglang-0.1.log", "sglang-0.log"]
