"""Router losses, expert loads and replayed routes on every mesh are those of `fsdp2` in one process."""

import pytest
import torch

from hone.data.packing import select
from hone.engines.settings import MoeConfig
from hone.models.errors import ModelError
from hone.models.routing import ROUTES
from hone.types import Metric, Reducer, merge_metrics
from tests.engines.contract.cases import LENGTHS, Mesh, make_batch, make_engine, own_part, policy, weights
from tests.ranks import run_ranks

LOSSES = {"router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.1}
REPLAY = {**LOSSES, "routing_replay": "old_logprobs"}
QWEN = ("qwen3_moe", (4, 4, 2))  # layers with experts, experts of each, and of each token
CASES = {
    "sequence": (*QWEN, {"moe": LOSSES}),
    "batch": (*QWEN, {"moe": {**LOSSES, "balance_over": "batch"}}),
    "replay": (*QWEN, {"moe": {**LOSSES, "routing_replay": "rollout"}}),
    "recomputed": (*QWEN, {"moe": REPLAY, "activation_checkpointing": True}),
    "groups": ("deepseek_v3", (3, 8, 3), {"moe": REPLAY}),
    "sinks": ("gpt_oss", (4, 4, 2), {"moe": REPLAY}),
}
SHARED = {"tensor": 2, "sequence": True}
MESHES = [
    Mesh("megatron", 2),
    Mesh("megatron", 2, {"expert": 2}),
    Mesh("megatron", 2, {"expert_tensor": 2}),
    Mesh("megatron", 2, {"context": 2}),
    Mesh("megatron", 4, {**SHARED, "expert": 2}),
    Mesh("megatron", 4, {"expert": 2, "pipeline": 2}),
    Mesh("megatron", 2, {"pipeline": 2, "virtual_pipeline": 2}),
    Mesh("megatron", 4, {**SHARED, "expert": 2, "pipeline": 2}),
]


def with_routes(batch, layers, experts, top_k):
    """The batch with experts that are drawn by token, not chosen; the router chooses for the last tokens."""
    drawn = torch.rand(128, layers, experts, generator=torch.Generator().manual_seed(3)).argsort(-1)[..., :top_k]
    routes = drawn[batch.token_ids].to(torch.int16)
    routes[batch.cu_seqlens[1:] - 1] = -1
    return batch.with_(routed_experts=routes)


def train_mixtures(mesh, folders):
    """Train each of CASES for two steps: routes that it recorded and replayed, metrics of the steps, and weights."""
    found = {}
    for name, (model, sizes, settings) in CASES.items():
        engine = make_engine(mesh, folders[model], **{**settings, "moe": MoeConfig(**settings["moe"])})
        for kind, batch in (("own", make_batch(9)), ("given", with_routes(make_batch(9), *sizes))):
            mine = own_part(engine, batch)
            output = engine.infer_batch(select(batch, mine), frozenset({ROUTES}))
            if engine.ranks.is_output_rank:
                parts = output.extras[ROUTES].split([LENGTHS[i] for i in mine])
                found |= {f"{name}/{kind} {i}": one for i, one in zip(mine, parts, strict=True)}
        steps = []
        for seed in range(2):
            batch = with_routes(make_batch(seed), *sizes)
            metrics = engine.train_batch(select(batch, own_part(engine, batch)), policy)
            steps.append({key: (one.total, one.count, one.reducer.name) for key, one in metrics.items()})
        found |= {f"{name}/steps": steps if engine.ranks.is_output_rank else []}
        found |= {f"{name}/weight {key}": value for key, value in weights(engine).items()}
    return found


@pytest.fixture(scope="module")
def wanted(folders):
    return train_mixtures(Mesh("fsdp2", 1), folders)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_mixtures_learn_and_route_as_in_one_process(mesh, folders, wanted, needs_backend):
    needs_backend(mesh.backend)
    ranks = run_ranks(mesh.world, train_mixtures, mesh, folders)
    for name, (_, sizes, settings) in CASES.items():
        _assert_routes(name, ranks, wanted, sizes, replays="routing_replay" in settings["moe"])
        for step, alone in enumerate(wanted[f"{name}/steps"]):
            merged = merge_metrics(*(_metrics(rank[f"{name}/steps"][step]) for rank in ranks if rank[f"{name}/steps"]))
            found = {key: metric.value for key, metric in merged.items()}
            assert found == pytest.approx({key: one.value for key, one in _metrics(alone).items()}, rel=1e-5, abs=1e-5)
            assert {"train/router_aux_loss", "train/expert_load_worst_layer"} <= found.keys()
        for key in wanted:
            if key.startswith(f"{name}/weight"):
                for rank in ranks:
                    torch.testing.assert_close(rank[key], wanted[key], rtol=1e-5, atol=1e-5, msg=lambda m, k=key: k + m)


def _metrics(found):
    return {key: Metric(total, count, Reducer[reducer]) for key, (total, count, reducer) in found.items()}


def _assert_routes(name, ranks, wanted, sizes, replays):
    asked = with_routes(make_batch(9), *sizes).routed_experts.split(LENGTHS)
    for i in range(len(LENGTHS)):
        for kind in ("own", "given"):
            (found,) = [rank[f"{name}/{kind} {i}"] for rank in ranks if f"{name}/{kind} {i}" in rank]
            assert found.dtype == torch.int16
            assert torch.equal(found, wanted[f"{name}/{kind} {i}"])
        if replays:
            assert torch.equal(found[:-1], asked[i][:-1])
            assert (found[-1] >= 0).all()


def refuse_dense(mesh, folder):
    with pytest.raises(ModelError, match=r"moe\.routing_replay: .*it has no experts; remove the key"):
        make_engine(mesh, folder, moe=MoeConfig(routing_replay="rollout"))
    return {}


@pytest.mark.slow
def test_a_dense_model_has_no_routes_to_replay(folders, needs_backend):
    needs_backend("megatron")
    run_ranks(2, refuse_dense, Mesh("megatron", 2), folders["qwen3"])
