"""What SGLang's loader leaves out in silence, because its model has no place for it, is an error of the sync.

The same with vLLM: vllm/test_weights.py.
"""

import pytest

from hone.types import GenerationRequest, SamplingParams
from hone.weights.base import WeightSyncError


@pytest.mark.sglang
def test_biases_without_a_place_in_the_engine_are_named(real_adapter, runner, tiny, push, finish):
    """Log-probs would be off by 0.4 to 0.6, and every parameter of the engine's model filled."""
    server = real_adapter("sglang", 5, kind="llama")
    runner.run(server.start())
    try:
        with pytest.raises(WeightSyncError, match=r"no place for model\.layers\.0\.mlp\.down_proj\.bias, .* left out"):
            push(server, list(tiny("llama").state_dict().items()), 1)
        with pytest.raises(RuntimeError, match=r"cannot generate: .*update_weights"):
            finish(server.generate(GenerationRequest("r", (9, 10), SamplingParams(4))))
    finally:
        runner.run(server.close())
