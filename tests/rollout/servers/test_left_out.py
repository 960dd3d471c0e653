"""What an engine's loader leaves out in silence, because its model has no place for it, is an error of the sync."""

import pytest

from hone.types import SamplingParams
from hone.weights.base import WeightSyncError


@pytest.mark.parametrize(
    ("backend", "kind", "bias"),
    [
        pytest.param("vllm", "qwen3_biased", r"self_attn\.o_proj\.bias", marks=pytest.mark.vllm),
        pytest.param("sglang", "llama", r"mlp\.down_proj\.bias", marks=pytest.mark.sglang),
    ],
)
def test_biases_without_a_place_in_the_engine_are_named(backend, kind, bias, real_adapter, runner, tiny, push, finish):
    """Log-probs would be off by 0.4 to 0.6, and every parameter of the engine's model filled."""
    server = real_adapter(backend, 5, kind=kind)
    runner.run(server.start())
    try:
        with pytest.raises(WeightSyncError, match=rf"no place for model\.layers\.0\.{bias}, .* left out"):
            push(server, list(tiny(kind).state_dict().items()), 1)
        with pytest.raises(RuntimeError, match=r"cannot generate: .*update_weights"):
            finish(server.generate("r", (9, 10), SamplingParams(4)))
    finally:
        runner.run(server.close())
