"""vLLM in tensor parallel gets from each training rank what its own rank needs, and no more."""

import pytest
from safetensors.torch import load_file

from hone.config import load
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run.launch import run_policy
from tests.trainers.tiny import BASE, metrics, recipe

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BUILD = {"hidden_size": 64, "layers": 2, "heads": 2, "mlp_size": 96, "max_positions": 128, "characters": "abcd"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXTURE = {**BUILD, "architecture": "qwen3_moe", "options": {**EXPERTS, "mlp_only_layers": [1]}}


def test_two_ranks_of_vllm_get_their_shards_from_two_training_ranks(tmp_path, real_python):
    """The model has one dense layer and one with experts."""
    changes = {
        "run": {**BASE["run"], "steps": 3},
        "model": {"build": MIXTURE},
        "rollout": {
            "backend": "vllm",
            "python": str(real_python("vllm")),
            "tensor_parallel": 2,
            "engine": {"kv_cache_memory_bytes": 2**26, "max_num_seqs": 64},
            "start_timeout_s": 280,
            "sampling": {"max_response_tokens": 6},
        },
        "weights": {"verify": "probe", "timeout_s": 120},
    }
    path = recipe(tmp_path, changes)
    run_policy(load(PolicyRunConfig, path, ["runtime.backend=ray", "runtime.backend.devices=2"]))
    size = sum(one.nbytes for one in load_file(tmp_path / "run" / "export" / "model.safetensors").values())
    steps = [row for row in metrics(tmp_path / "run") if row["step"]]
    assert len(steps) == 3
    for row in steps:  # version 0, before them, came whole
        assert row["correction/max_abs_difference"] < 1e-4
        assert row["correction/probe_max_abs_difference"] < 1e-4
        assert row["weights/senders"] == 2
        assert 0.5 * size < row["weights/bytes"] < 0.55 * size
