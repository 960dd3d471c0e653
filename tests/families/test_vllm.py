"""A real vLLM takes in what transformers keeps otherwise than files do: the experts of a mixture."""

import pytest

from tests.families.checks import VLLM_PYTHON, YES, vllm_rollout
from tests.families.families import FAMILIES, save

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not VLLM_PYTHON.is_file(), reason="there is no .venv-vllm: make test-vllm"),
]


def test_experts_are_those_of_the_trainer(tmp_path):
    names = ("Qwen3-MoE", "Qwen3")
    assert vllm_rollout([save(FAMILIES[name], tmp_path / name) for name in names]) == [YES, YES]
