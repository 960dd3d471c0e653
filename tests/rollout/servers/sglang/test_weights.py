"""What SGLang's loader leaves out in silence is an error of the sync."""

import pytest

from hone.types import SamplingParams
from hone.weights.base import WeightSyncError

pytestmark = pytest.mark.sglang


def test_biases_that_sglang_has_no_place_for_are_named(real_adapter, runner, tiny, push, finish):
    """Its Llama has none in the feed-forward layers; log-probs would be off by 0.6."""
    server = real_adapter("sglang", 5, kind="llama")
    runner.run(server.start())
    try:
        with pytest.raises(WeightSyncError, match=r"no place for model\.layers\.0\.mlp\.down_proj\.bias, .* left out"):
            push(server, list(tiny("llama").state_dict().items()), 1)
        with pytest.raises(RuntimeError, match="cannot generate before update_weights"):
            finish(server.generate("r", (9, 10), SamplingParams(4)))
    finally:
        runner.run(server.close())
