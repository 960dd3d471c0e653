"""GRPO teaches models with layers that carry a state, judged by exact match, and also while answers are generated."""

import pytest

from hone.registry import resolve
from tests.learning.conftest import SCRIPT

pytestmark = pytest.mark.slow

MODELS = {
    "nemotron_h": {
        "layers": 4,
        "options.layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
        "options.mamba_num_heads": 4,
        "options.mamba_head_dim": 32,
        "options.ssm_state_size": 16,
        "options.n_groups": 1,
        "options.chunk_size": 16,
    },
    "qwen3_5_text": {
        "options.layer_types": ["linear_attention", "full_attention"],
        "options.linear_num_key_heads": 2,
        "options.linear_num_value_heads": 4,
        "options.linear_key_head_dim": 16,
        "options.linear_value_head_dim": 16,
    },
}
BESIDE = {
    "asynchrony.staleness": 1,
    "algorithm.correction.old": "rollout",
    "rollout.builtin.process": "separate",
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("settings", [{}, BESIDE], ids=["before the update", "while it trains"])
def test_a_model_with_a_state_learns_to_reverse_three_characters(kind, settings, learns):
    model = {"architecture": kind, **MODELS[kind]}
    build = {f"model.build.{key}": value for key, value in model.items()}
    learns(resolve(f"{SCRIPT}:Row")("grpo", "ppo", {**build, **settings}), kind)
