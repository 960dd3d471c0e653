"""A real vLLM serves what each engine has trained: after every weight sync it has the trainer's log-probs.

GRPO on two ranks under Ray. The answers of step 2 are sampled from the weights that step 1 has trained, and a sync is
complete only when vLLM's digest equals the trainer's. What is stale or misplaced shows as 0.01 and more.
"""

import gc

import pytest

from hone.config import load
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run.launch import run_policy
from tests.engines.contract.test_runs import RAY
from tests.families.checks import VLLM_PYTHON
from tests.trainers.tiny import BASE, metrics, recipe

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not VLLM_PYTHON.is_file(), reason="there is no .venv-vllm: make .venv-vllm"),
]

STEPS = 2
DENSE = {"hidden_size": 64, "layers": 2, "heads": 2, "kv_heads": 2, "mlp_size": 96, "max_positions": 128}
MIXTURE = {
    **DENSE,
    "architecture": "qwen3_moe",
    "tie_embeddings": False,
    "options": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
}
RUNS = {
    "megatron tensor": (DENSE, {"tensor": 2}),
    "megatron pipeline": (MIXTURE, {"pipeline": 2}),
    "veomni": (DENSE, {}),
    "veomni experts": (MIXTURE, {}),
    "automodel tensor": (DENSE, {"tensor": 2}),
    "automodel experts": (MIXTURE, {}),
    "torchtitan tensor": (DENSE, {"tensor": 2}),
    "torchtitan": (DENSE, {}),
}


@pytest.fixture(autouse=True)
def _end_the_ranks_before():
    """Ranks end with the objects of their run: megatron-core keeps its groups for a whole process."""
    gc.collect()


@pytest.mark.parametrize("run", RUNS)
def test_vllm_samples_from_the_weights_that_were_trained(run, tmp_path, needs_backend):
    backend, (build, parallel) = run.partition(" ")[0], RUNS[run]
    needs_backend(backend)
    changes = {
        "run": {**BASE["run"], "steps": STEPS},
        "model": {"build": {**build, "characters": "abcd"}},
        "actor": {"compute_dtype": "float32", "optimizer": {"lr": 1e-2}, "backend": {"name": backend}},
        "rollout": {
            "backend": "vllm",
            "python": str(VLLM_PYTHON),
            "engine": {"kv_cache_memory_bytes": 2**26, "max_num_seqs": 64},
            "start_timeout_s": 280,
            "sampling": {"max_response_tokens": 24},
        },
        "weights": {"verify": "probe", "timeout_s": 120},
        "evaluation": {"every_steps": 0},
    }
    if parallel:
        changes["actor"]["backend"]["parallel"] = parallel
    run_policy(load(PolicyRunConfig, recipe(tmp_path, changes), RAY))
    steps = [line for line in metrics(tmp_path / "run") if line["step"]]
    assert len(steps) == STEPS
    for line in steps:
        assert line["correction/max_abs_difference"] < 1e-4, "of any token that was trained on"
        assert line["correction/probe_max_abs_difference"] < 1e-4
        assert line["weights/version"] == line["step"]
        assert line["train/grad_norm"] > 1e-3, "so the next step's weights are others"
