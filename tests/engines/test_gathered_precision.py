"""Ranks gather weights in the precision in which they are sent: half the bytes, the same bits as a cast afterwards."""

import math

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hone.models.numerics.precision import in_dtype, wide_weights
from tests.engines.contract.cases import Mesh, make_engine
from tests.families.families import FAMILIES, save
from tests.ranks import run_ranks

SENT = {"c10d::_allgather_base_": 1, "gloo:all_reduce": 0}
"""Collectives over bytes, as the profiler names them: which of their shapes is what this rank puts in."""


def gathered(engine, dtype):
    """The weights in `dtype`, and the bytes that this rank put into each collective."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        weights = dict(engine.get_per_tensor_param(dtype=dtype)[0])
    shares = [math.prod(one.input_shapes[SENT[one.name]]) for one in profiled.events() if one.name in SENT]
    return weights, shares


def both(folder: str, mesh: Mesh):
    engine = make_engine(mesh, folder)
    wide = wide_weights(engine.model)
    whole, in_float32 = gathered(engine, None)
    narrow, in_bfloat16 = gathered(engine, torch.bfloat16)
    same = [
        one.dtype == narrow[name].dtype and torch.equal(one, narrow[name])
        for name, one in ((name, in_dtype(name, tensor, torch.bfloat16, wide)) for name, tensor in whole.items())
    ]
    return {
        "same": all(same) and whole.keys() == narrow.keys(),
        "float32": in_float32,
        "bfloat16": in_bfloat16,
        "wide": sorted(name for name, one in narrow.items() if one.dtype == torch.float32),
    }


@pytest.mark.slow
def test_two_ranks_exchange_two_bytes_for_each_weight_and_four_for_a_router_kept_in_float32(tmp_path):
    """ERNIE's router [4, 64] and its bias [1, 4] stay in float32; one row cannot be cut, so both ranks send it."""
    folder = save(FAMILIES["ERNIE 4.5 MoE"], tmp_path / "model")
    ranks = run_ranks(2, both, str(folder), Mesh("fsdp2", 2))
    assert all(one["same"] for one in ranks)
    (one, other) = ranks
    assert len(one["wide"]) == 2
    router, bias = 4 * 64 // 2, 4  # elements of one rank
    assert len(one["bfloat16"]) == 1  # one bucket
    assert one["float32"] == other["float32"]
    assert one["bfloat16"] == other["bfloat16"] == [one["float32"][0] // 2 + 2 * (router + bias)]


@pytest.mark.slow
def test_four_ranks_exchange_half_the_bytes_of_each_collective(tmp_path):
    """Experts over two ranks, each sharded over two: a collective for each cut."""
    folder = save(FAMILIES["Qwen3-MoE"], tmp_path / "model")
    ranks = run_ranks(4, both, str(folder), Mesh("fsdp2", 4, {"expert": 2}))
    assert all(one["same"] and one["wide"] == [] for one in ranks)
    for one in ranks:
        assert len(one["float32"]) == len(one["bfloat16"]) > 2
        assert [2 * share for share in one["bfloat16"]] == one["float32"]
    assert {sum(one["bfloat16"]) for one in ranks} == {sum(ranks[0]["bfloat16"])}
