"""A real vLLM takes in what it would lose in an update by itself: what hone patches in it for a family."""

import pytest

from tests.families.checks import VLLM_PYTHON, YES
from tests.families.families import FAMILIES
from tests.families.table import run_cell

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not VLLM_PYTHON.is_file(), reason="there is no .venv-vllm: make test-vllm"),
]


@pytest.mark.parametrize("column", ["vllm", "vllm_bf16"])
@pytest.mark.parametrize(
    "name",
    [
        "Qwen3-MoE",  # experts, packed for the CPU's kernel again
        "gpt-oss",  # fused experts and attention sinks, which vLLM copies past its weight loaders
        "Gemma 2",  # a head that is the embedding, and has no name in vLLM
        "Gemma 3n",  # embeddings per layer, which vLLM's text-only class leaves out
        "GLM-4-MoE",  # a router's bias in float32
        "ERNIE 4.5 MoE",  # a bias by which a softmax router chooses
        "DeepSeek-V3",  # a bias too, and a config that vLLM changes, so that transformers does not know it any more
    ],
)
def test_vllm_samples_from_the_weights_that_were_trained(name, column):
    assert run_cell(FAMILIES[name], column) == YES
