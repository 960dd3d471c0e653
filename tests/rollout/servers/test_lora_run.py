"""A whole GRPO run on each real engine in which the LoRA adapter alone travels at each step."""

import pytest

from hone.cli.recipe import load_recipe
from hone.trainers.run.launch import run_policy
from tests.rollout.conftest import REAL, REAL_ENGINES
from tests.rollout.servers.vllm.test_run import BUILD
from tests.trainers.tiny import BASE, metrics, recipe


@pytest.mark.parametrize("backend", REAL_ENGINES)
def test_the_adapter_alone_travels_and_the_samples_are_the_policys(backend, tmp_path, real_python):
    changes = {
        "run": {**BASE["run"], "steps": 3},
        "model": {"build": BUILD},
        "actor": {**BASE["actor"], "optimizer": {"lr": 3e-2}, "lora": {"rank": 4, "alpha": 16}},
        "rollout": {
            "backend": backend,
            "python": str(real_python(backend)),
            "engine": REAL[backend].small,
            "start_timeout_s": REAL[backend].start_timeout_s,
            "sampling": {"max_response_tokens": 24},
        },
        "weights": {"verify": "probe", "timeout_s": 120},
    }
    path = recipe(tmp_path / backend, changes)
    run_policy(load_recipe(path))
    _, *steps = metrics(tmp_path / backend / "run")
    assert [line["step"] for line in steps] == [1, 2, 3]
    for line in steps:
        assert line["weights/version"] == line["step"]
        assert line["weights/bytes"] < 50_000, "a quarter of all weights, or less"
        assert line["correction/max_abs_difference"] < 1e-4, "of any token that was trained on"
        assert line["correction/probe_max_abs_difference"] < 1e-4
        assert line["train/grad_norm"] > 1e-3, "so the next step's adapter is another"
