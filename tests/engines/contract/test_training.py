"""Every backend on every mesh trains as `fsdp2` does in one process, and scores tokens as transformers does."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hone.models.loading import without_progress_bars
from tests.engines.contract.cases import LENGTHS, MODELS, Mesh, make_batch, train_models
from tests.ranks import run_ranks

SHARED = {"tensor": 2, "sequence": True}
QUICK = [Mesh("fsdp2", 2, {"tensor": 2}), Mesh("megatron", 1), Mesh("megatron", 2, {"tensor": 2})]
SLOW = [
    Mesh("megatron", 2),
    Mesh("megatron", 2, SHARED),
    Mesh("megatron", 2, {"context": 2}),
    Mesh("megatron", 2, {"pipeline": 2}),
    Mesh("megatron", 2, {"pipeline": 2, "virtual_pipeline": 2}),
    Mesh("megatron", 4, SHARED),
    Mesh("megatron", 4, {**SHARED, "context": 2}),
    Mesh("megatron", 4, {**SHARED, "pipeline": 2}),
    Mesh("megatron", 4, {"pipeline": 2}),
    Mesh("megatron", 4, {"context": 2, "pipeline": 2, "virtual_pipeline": 2}),
]
MESHES = [*QUICK, *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in SLOW)]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, "value"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_training_equals_that_of_one_process(mesh, name, alone, trained, needs_backend):
    needs_backend(mesh.backend)
    _assert_alike(mesh, _of(alone, name), [_of(rank, name) for rank in trained(mesh)])


def _assert_alike(mesh, wanted, ranks):
    for step, (loss, norm) in enumerate(wanted["steps"]):
        assert sum(rank["steps"][step][0] for rank in ranks) == pytest.approx(loss, rel=1e-5, abs=1e-5)
        assert [rank["steps"][step][1] for rank in ranks] == pytest.approx([norm] * mesh.world, rel=1e-5)
    for i in range(len(LENGTHS)):
        found = [rank[f"score {i}"] for rank in ranks if f"score {i}" in rank]
        assert len(found) == 1
        torch.testing.assert_close(found[0], wanted[f"score {i}"], rtol=1e-5, atol=1e-5)
    for rank in ranks:
        assert {key for key in rank if not key.startswith("s")} == {key for key in wanted if not key.startswith("s")}
        for key in set(wanted) - {"steps"} - {f"score {i}" for i in range(len(LENGTHS))}:
            assert torch.equal(rank[key], ranks[0][key]), f"{key} differs between ranks"
            torch.testing.assert_close(rank[key], wanted[key], rtol=1e-5, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("name", MODELS)
def test_one_process_scores_as_transformers_does(name, alone, folders):
    batch = make_batch(9)
    with without_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(folders[name]).eval()
    for i, (begin, length) in enumerate(zip(batch.cu_seqlens.tolist(), LENGTHS, strict=False)):
        ids = batch.token_ids[begin : begin + length]
        with torch.no_grad():
            logits = model(ids[None]).logits[0] / 0.9
        wanted = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        wanted = torch.nn.functional.pad(wanted, (1, 0)) * batch.loss_mask[begin : begin + length]
        torch.testing.assert_close(alone[f"{name}/score {i}"], wanted, rtol=1e-5, atol=1e-5)


EXPERTS = [
    Mesh("megatron", 2, {"expert": 2}),
    Mesh("megatron", 2),
    Mesh("megatron", 4, {**SHARED, "expert": 2}),
    Mesh("megatron", 4, {"expert": 2, "pipeline": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", EXPERTS, ids=str)
def test_mixtures_of_experts_train_as_in_one_process(mesh, mixtures, needs_backend):
    needs_backend(mesh.backend)
    alone, ranks = train_models(Mesh("fsdp2", 1), mixtures), run_ranks(mesh.world, train_models, mesh, mixtures)
    for name, _, _ in mixtures:
        _assert_alike(mesh, _of(alone, name), [_of(rank, name) for rank in ranks])


def _of(found, name):
    return {key.removeprefix(f"{name}/"): value for key, value in found.items() if key.startswith(f"{name}/")}
