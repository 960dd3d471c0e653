"""Weights that are sent in bfloat16 are gathered in bfloat16."""

import pytest

from tests.engines.contract.cases import Mesh, save_model
from tests.engines.test_gathered_precision import both
from tests.ranks import run_ranks

pytest.importorskip("megatron.core")


@pytest.mark.slow
def test_the_ranks_sum_half_the_bytes(tmp_path):
    """Megatron's owners lay their boxes into zeros and sum bytes; every tensor here has a multiple of 8 bytes."""
    ranks = run_ranks(2, both, str(save_model("qwen3", tmp_path / "model")), Mesh("megatron", 2))
    for one in ranks:
        assert one["same"]
        assert [2 * sent for sent in one["bfloat16"]] == one["float32"] != []
