"""A real vLLM takes in what it would lose in an update by itself: what hone patches in it for a family."""

from itertools import product

import pytest

from tests.families.checks import VLLM_PYTHON, YES
from tests.families.families import FAMILIES
from tests.families.table import run_cell

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not VLLM_PYTHON.is_file(), reason="there is no .venv-vllm: make test-vllm"),
]


PATCHED = [
    "Qwen3-MoE",  # experts, packed for the CPU's kernel again
    "gpt-oss",  # fused experts and attention sinks, which vLLM copies past its weight loaders
    "Gemma 2",  # a head that is the embedding, and has no name in vLLM
    "Gemma 3n",  # embeddings per layer, which vLLM's text-only class leaves out
    "GLM-4-MoE",  # a router's bias in float32
    "ERNIE 4.5 MoE",  # a bias by which a softmax router chooses
    "DeepSeek-V3",  # a bias too, and a config that vLLM changes, so that transformers does not know it any more
]


@pytest.mark.parametrize(
    ("name", "column"),
    [
        *product(PATCHED, ["vllm", "vllm_bf16"]),
        ("Llama 4", "vllm"),  # queries scaled by their position, which vLLM leaves out of short contexts
        ("Falcon-H1", "vllm_bf16"),  # convolutions, packed in bfloat16 where the CPU has instructions for it
    ],
)
def test_vllm_samples_from_the_weights_that_were_trained(name, column):
    assert run_cell(FAMILIES[name], column) == YES
