"""Training ranks gather only the boxes that they send, under the names of the model's files."""

import math

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hone.engines.fsdp2.settings import Fsdp2Settings, ParallelConfig
from hone.engines.settings import EngineConfig
from hone.models.parts.boxes import Boxed, from_text, nothing, to_text, whole
from hone.models.parts.views import Viewed
from hone.models.settings import ModelConfig
from hone.weights.transports.ipc.rank_sender import cut
from hone.workers.train import TrainSpec, TrainWorker, WeightRequest
from tests.families.families import FAMILIES, save
from tests.ranks import run_ranks

PUT_IN = {"c10d::alltoall_base_": 1, "c10d::_allgather_base_": 1}
"""Collectives over bytes, as the profiler names them: which of their shapes is what this rank puts in."""
EXPERTS = 4
LAYOUTS = {
    "tensor": lambda name, shape, rank, world: rows(shape, rank, world),
    "expert": lambda name, shape, rank, world: own_experts(name, shape, rank, world),
    "columns": lambda name, shape, rank, world: columns(shape, rank, world),
}


def rows(shape, rank, world):
    if len(shape) < 2 or shape[0] % world:
        return whole(shape)
    step = shape[0] // world
    return ((rank * step, rank * step + step), *whole(shape[1:]))


def columns(shape, rank, world):
    if len(shape) < 2 or shape[-1] % world:
        return whole(shape)
    step = shape[-1] // world
    return (*whole(shape[:-1]), (rank * step, rank * step + step))


def own_experts(name, shape, rank, world):
    if ".experts." not in name:
        return rows(shape, rank, world)
    number = int(name.partition(".experts.")[2].split(".")[0])
    return whole(shape) if number * world // EXPERTS == rank else nothing(shape)


def measured(stream):
    """What a stream yields, and the bytes that this rank put into collectives meanwhile."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        found = list(stream)
    shapes = [one.input_shapes[PUT_IN[one.name]] for one in profiled.events() if one.name in PUT_IN]
    return found, sum(math.prod(shape) for shape in shapes)


def gathered(folder, parallel, dtype, in_files, layout, idle):
    """Compare what the ranks get of their boxes with the same boxes of everything. The last `idle` ranks need none."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    backend = Fsdp2Settings(parallel=ParallelConfig(**parallel))
    spec = TrainSpec(ModelConfig(path=folder), EngineConfig(compute_dtype="float32", backend=backend), total_steps=9)
    worker = TrainWorker(spec)
    worker.initialize()
    arguments = getattr(torch, dtype), in_files
    everything, whole_bytes = measured(worker.weights(*arguments))
    everything = dict(everything)
    senders = world - idle
    texts = [
        to_text({n: Boxed(tuple(t.shape), LAYOUTS[layout](n, t.shape, r, senders)) for n, t in everything.items()})
        if r < senders
        else None
        for r in range(world)
    ]
    result = {"whole": whole_bytes, "same": True, "names": True, "bytes": 0, "wrong": []}
    for _ in range(2):  # the second time, everything is known
        found, result["bytes"] = measured(worker._needed(tuple(texts), WeightRequest("merged", *arguments)))
        result["names"] &= [name for name, _ in found] == list(everything)
        result["held"] = sum(one.part.nbytes for _, one in found if isinstance(one, Viewed))
        if texts[rank] is None:
            continue
        boxes = from_text(texts[rank])
        for name, tensor in cut(iter(found), boxes, {}):
            expected = boxes[name].of(name, everything[name]) if name in boxes else everything[name]
            if tensor.dtype != expected.dtype or not torch.equal(tensor, expected):
                result["wrong"].append(name)
    again = dict(worker.weights(*arguments))
    result["same"] = all(torch.equal(one, everything[name]) for name, one in again.items())
    return result


CASES = {
    "a dense model, rows": ("Qwen3", 2, {}, "float32", False, "tensor", 0),
    "a dense model, columns, in bfloat16": ("Qwen3", 4, {"tensor": 2}, "bfloat16", True, "columns", 0),
    "a mixture, its experts apart": ("Qwen3-MoE", 2, {}, "bfloat16", True, "expert", 0),
    "a mixture, trained in expert parallel": ("Qwen3-MoE", 4, {"expert": 2}, "float32", True, "expert", 0),
    "a mixture, its experts cut": ("Qwen3-MoE", 4, {"expert": 2}, "bfloat16", True, "tensor", 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_each_rank_gathers_the_bits_of_its_boxes_and_fewer_bytes(case, tmp_path):
    family, world, parallel, dtype, in_files, layout, idle = CASES[case]
    folder = save(FAMILIES[family], tmp_path / "model")
    ranks = run_ranks(world, gathered, str(folder), parallel, dtype, in_files, layout, idle)
    for one in ranks:
        assert one["wrong"] == []
        assert one["names"]
        assert one["same"], "whole tensors afterwards"
    sent, whole_sent = sum(one["bytes"] for one in ranks), sum(one["whole"] * (world - 1) for one in ranks)
    print(case, [(one["bytes"], one["whole"], one["held"]) for one in ranks])
    assert 0 < sent < whole_sent
