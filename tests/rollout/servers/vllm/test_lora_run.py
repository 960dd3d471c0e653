"""A whole GRPO run on the real vLLM in which the LoRA adapter alone travels at each step."""

import pytest

from hone.cli.recipe import load_recipe
from hone.trainers.launch import run_policy
from tests.rollout.servers.vllm.test_run import BUILD
from tests.trainers.tiny import BASE, metrics, recipe

pytestmark = pytest.mark.vllm


def test_the_adapter_alone_travels_and_the_samples_are_the_policys(tmp_path, real_python):
    changes = {
        "run": {**BASE["run"], "steps": 3},
        "model": {"build": BUILD},
        "actor": {**BASE["actor"], "optimizer": {"lr": 3e-2}, "lora": {"rank": 4, "alpha": 16}},
        "rollout": {
            "backend": "vllm",
            "python": str(real_python("vllm")),
            "engine": {"kv_cache_memory_bytes": 2**26, "max_num_seqs": 64},
            "start_timeout_s": 280,
            "sampling": {"max_response_tokens": 24},
        },
        "weights": {"verify": "probe", "timeout_s": 120},
        "evaluation": {"every_steps": 0},
    }
    path = recipe(tmp_path / "vllm", changes)
    run_policy(load_recipe(path))
    _, *steps = metrics(tmp_path / "vllm" / "run")
    assert [line["step"] for line in steps] == [1, 2, 3]
    for line in steps:
        assert line["weights/version"] == line["step"]
        assert line["weights/bytes"] < 50_000, "a quarter of all weights, or less"
        assert line["correction/max_abs_difference"] < 1e-4, "of any token that was trained on"
        assert line["correction/probe_max_abs_difference"] < 1e-4
        assert line["train/grad_norm"] > 1e-3, "so the next step's adapter is another"
