"""megatron-core has one set of groups for a process: engines of one time share them, a later one may open others."""

import gc

import pytest
import torch.distributed as dist

pytest.importorskip("megatron.core")

from tests.engines.contract.cases import Mesh, make_engine, save_model, train, weights
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

TENSOR = Mesh("megatron", 2, {"tensor": 2})
STAGES = Mesh("megatron", 2, {"pipeline": 2, "virtual_pipeline": 2})
REFUSED = (
    r"^backend\.parallel: this process has a megatron engine with tensor=2, pipeline=1, virtual_pipeline=1, and this "
    r"one asks for tensor=1, pipeline=2, virtual_pipeline=2; .*drop all references"
)


def groups():
    return len(dist.distributed_c10d._world.pg_map)


def one_after_another(folder):
    """Steps of an engine on each mesh, the weights of the last, and how many groups there are while each is in use."""
    found = {"steps": [], "groups": []}
    for mesh in (TENSOR, STAGES, TENSOR):
        engine = make_engine(mesh, folder)
        found["groups"].append(groups())
        found["steps"].append(train(engine))
        last = weights(engine)
        del engine
    return {**found, **last}


def together(folder):
    """One rank keeps an engine: neither may open other groups, and the engine goes on."""
    engine = make_engine(TENSOR, folder)
    keeps, rank = engine, dist.get_rank()
    del engine
    if rank:
        del keeps
    with pytest.raises(ValueError, match=REFUSED):
        make_engine(STAGES, folder)
    other = make_engine(TENSOR, folder)
    gc.collect()
    return {"steps": train(other)}


def test_the_groups_of_an_engine_that_has_ended_are_replaced(tmp_path):
    folder = save_model("qwen3", tmp_path)
    for rank in run_ranks(2, one_after_another, folder):
        first, stages, again = rank["steps"]
        assert first == again
        assert [norm for _, norm in stages] == pytest.approx([norm for _, norm in first], rel=1e-5)
        assert rank["groups"][0] == rank["groups"][2], "groups that nobody uses should be destroyed"


def test_the_groups_of_an_engine_in_use_are_kept_on_all_ranks(tmp_path):
    folder = save_model("qwen3", tmp_path)
    first, second = run_ranks(2, together, folder)
    assert [norm for _, norm in first["steps"]] == [norm for _, norm in second["steps"]]
