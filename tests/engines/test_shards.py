"""What a rank holds is read from any DTensor, whatever its mesh is called and however often it is cut."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hone.engines.base import JobRanks
from hone.engines.fsdp2.shards import MeshShard, gather, local_part
from tests.ranks import run_ranks

WHOLE = torch.arange(7 * 6.0).view(7, 6)
CUTS = {
    "replicated": [Replicate(), Replicate()],
    "outer": [Shard(1), Replicate()],
    "inner": [Replicate(), Shard(-1)],
    "both dimensions": [Shard(0), Shard(1)],
    "one dimension twice, outer first": [Shard(0), Shard(0)],
}


class FourRanks(JobRanks):
    world = 4

    def __init__(self, rank):
        self.rank = rank


def read_all():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    ranks = FourRanks(torch.distributed.get_rank())
    weights = {name: distribute_tensor(WHOLE, mesh, cuts) for name, cuts in CUTS.items()} | {"plain": WHOLE}
    for name, cut in {"inner first, same dimension": 0, "inner first, other dimension": 1}.items():
        layer = nn.Linear(6, 7, bias=False)
        layer.weight = nn.Parameter(distribute_tensor(WHOLE, mesh["columns"], [Shard(cut)]))
        weights[name] = fully_shard(layer, mesh=mesh["rows"]).weight.detach()
    found = {}
    for name, weight in weights.items():
        shard, local = MeshShard.of(weight, ranks), local_part(weight)
        pieces = [(piece.offset, local[piece.at].tolist()) for piece in shard.pieces()]
        found[name] = {"owner": shard.is_owner, "copies": shard.copies, "pieces": pieces}
        found[name]["local"] = list(local.shape) == shard.local_shape()
        found[name]["gathered"] = torch.equal(dict(gather([(name, local, shard)]))[name], WHOLE)
    return found


@pytest.mark.slow
def test_every_number_has_one_owner_and_lies_where_the_shard_says():
    ranks = run_ranks(4, read_all)
    for name in ranks[0]:
        held, owned = torch.zeros(7, 6), torch.zeros(7, 6)
        for one in (rank[name] for rank in ranks):
            assert one["local"], name
            assert one["gathered"], name
            for (row, column), values in one["pieces"]:
                there = slice(row, row + len(values)), slice(column, column + len(values[0]))
                assert values == WHOLE[there].tolist(), name
                held[there] += 1
                owned[there] += one["owner"]
        assert (owned == 1).all(), name
        assert (held == ranks[0][name]["copies"]).all(), name
