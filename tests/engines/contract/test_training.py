"""Every backend on every mesh trains as `fsdp2` does in one process, and scores tokens as transformers does."""

import pytest
import torch

from tests.engines.contract.cases import (
    FAMILIES,
    LENGTHS,
    MODELS,
    Mesh,
    make_engine,
    names_of,
    train_models,
)
from tests.ranks import run_ranks

SHARED = {"tensor": 2, "sequence": True}
OWN = {"models": "automodel"}
QUICK = [Mesh("fsdp2", 2, {"tensor": 2}), Mesh("megatron", 1), Mesh("megatron", 2, {"tensor": 2})]
SLOW = [
    Mesh("torchtitan", 1),
    Mesh("torchtitan", 2),
    Mesh("torchtitan", 2, {"tensor": 2}),
    Mesh("torchtitan", 2, SHARED),
    Mesh("torchtitan", 4, {"tensor": 2}),
    Mesh("torchtitan", 4, {**SHARED, "replicate": 2}),
    Mesh("automodel", 1, more=OWN),
    Mesh("automodel", 2, more=OWN),
    Mesh("automodel", 2, {"tensor": 2}, OWN),
    Mesh("automodel", 2),
    Mesh("automodel", 2, {"tensor": 2}),
    Mesh("automodel", 2, {"sequence": 2}),
    Mesh("automodel", 4, {"tensor": 2}),
    Mesh("automodel", 4, {"replicate": 2}),
    Mesh("veomni", 1),
    Mesh("veomni", 2),
    Mesh("veomni", 2, {"sequence": 2}),
    Mesh("veomni", 4, {"replicate": 2, "sequence": 2}),
    Mesh("megatron", 2),
    Mesh("megatron", 2, SHARED),
    Mesh("megatron", 2, {"context": 2}),
    Mesh("megatron", 2, {"pipeline": 2}),
    Mesh("megatron", 2, {"pipeline": 2, "virtual_pipeline": 2}),
    Mesh("megatron", 4, SHARED),
    Mesh("megatron", 4, {**SHARED, "context": 2}),
    Mesh("megatron", 4, {**SHARED, "pipeline": 2}),
    Mesh("megatron", 4, {"pipeline": 2, "layers": (1, 3)}),
    Mesh("megatron", 4, {"context": 2, "pipeline": 2, "virtual_pipeline": 2}),
]
CASES = [
    pytest.param(mesh, name, id=f"{mesh}-{name}")
    for mesh in [*QUICK, *SLOW]
    for name in [*MODELS, "value", "value-qwen3"]
    if name in names_of(mesh)
]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "name"), CASES)
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


EXPERTS = [
    Mesh("automodel", 2),
    Mesh("veomni", 1),
    Mesh("veomni", 2),
    Mesh("megatron", 2, {"expert": 2}),
    Mesh("megatron", 2),
    Mesh("megatron", 4, {**SHARED, "expert": 2}),
    Mesh("megatron", 4, {"expert": 2, "pipeline": 2}),
    Mesh("megatron", 2, SHARED),
    Mesh("megatron", 2, {"expert_tensor": 2}),
    Mesh("megatron", 4, {"expert": 2, "expert_tensor": 2}),
    Mesh("megatron", 4, {**SHARED, "expert_tensor": 4}),
]


@pytest.fixture(scope="module")
def mixtures_alone(mixtures):
    return train_models(Mesh("fsdp2", 1), mixtures)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", EXPERTS, ids=str)
def test_mixtures_of_experts_train_as_in_one_process(mesh, mixtures, mixtures_alone, needs_backend):
    needs_backend(mesh.backend)
    ranks = run_ranks(mesh.world, train_models, mesh, mixtures)
    for name, _, _ in mixtures:
        _assert_alike(mesh, _of(mixtures_alone, name), [_of(rank, name) for rank in ranks])


def _of(found, name):
    return {key.removeprefix(f"{name}/"): value for key, value in found.items() if key.startswith(f"{name}/")}


# ------------------------------------------------------------------------------------- other architectures of mixtures

FAMILY_MESHES = [
    Mesh("megatron", 1),
    Mesh("megatron", 2, {"context": 2}),
    Mesh("megatron", 2, {"pipeline": 2}),
    Mesh("megatron", 2, {**SHARED, "expert": 2}),
    Mesh("megatron", 2, {**SHARED, "expert_tensor": 2}),
]


@pytest.fixture(scope="module")
def families(folders):
    value = [(f"{name} value", folders[name], {"model_type": "value_model"}) for name in ("deepseek_v3", "gpt_oss")]
    return [*((name, folders[name], {}) for name in FAMILIES), *value]


@pytest.fixture(scope="module")
def families_alone(families):
    return train_models(Mesh("fsdp2", 1), families)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", FAMILY_MESHES, ids=str)
def test_architectures_train_as_in_one_process(mesh, families, families_alone, needs_backend):
    needs_backend(mesh.backend)
    ranks = run_ranks(mesh.world, train_models, mesh, families)
    for name, _, _ in families:
        _assert_alike(mesh, _of(families_alone, name), [_of(rank, name) for rank in ranks])


def send_narrow(mesh, folder):
    """What a rollout that computes in bfloat16 gets."""
    engine = make_engine(mesh, folder, compute_dtype="bfloat16")
    return dict(engine.get_per_tensor_param(dtype=torch.bfloat16)[0])


@pytest.mark.slow
def test_biases_of_the_choice_stay_in_float32(folders, needs_backend):
    needs_backend("megatron")
    wanted = send_narrow(Mesh("fsdp2", 1), folders["glm4_moe"])
    found = run_ranks(2, send_narrow, Mesh("megatron", 2, {"pipeline": 2}), folders["glm4_moe"])[0]
    assert {key: one.dtype for key, one in found.items()} == {key: one.dtype for key, one in wanted.items()}
    assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []
    assert found["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
