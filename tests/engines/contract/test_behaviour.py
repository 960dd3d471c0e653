"""What every engine does besides learning: skipped steps, precision, inference alone, recomputation, bad settings."""

import pytest
import torch

from hone.data.packing import select
from hone.models.errors import ModelError
from tests.engines.contract.cases import (
    LOSSES,
    Mesh,
    make_batch,
    make_engine,
    nothing_finite,
    own_part,
    scores,
    train,
    weights,
)
from tests.ranks import run_ranks

ENGINES = [
    Mesh("fsdp2", 2, {"tensor": 2}),
    Mesh("megatron", 2, {"tensor": 2}),
    Mesh("veomni", 2),
    Mesh("automodel", 2, {"tensor": 2}),
    Mesh("automodel", 2, {}, {"models": "automodel"}),
    Mesh("torchtitan", 2, {"tensor": 2}),
]
STAGES = Mesh("megatron", 2, {"pipeline": 2})


def behave(mesh, folder):
    """Everything that needs the ranks, in one start of them."""
    found = {}
    engine = make_engine(mesh, folder)
    before = weights(engine)
    batch = make_batch(0)
    metrics = engine.train_batch(select(batch, own_part(engine, batch)), nothing_finite)
    found["skipped"] = metrics["train/skipped_steps"].value if engine.ranks.is_output_rank else 0.0
    found["kept"] = all(torch.equal(one, before[name]) for name, one in weights(engine).items())
    train(engine, [0])
    whole = {f"whole/{name}": one for name, one in weights(engine).items()}

    recomputing = make_engine(mesh, folder, activation_checkpointing=mesh.backend == "torchtitan" or "offload")
    train(recomputing, [0])
    found["recomputed"] = all(torch.equal(one, whole[f"whole/{name}"]) for name, one in weights(recomputing).items())

    only = make_engine(mesh, folder, total_steps=0)
    found |= {f"only/{key}": value for key, value in scores(only).items()}
    found["only"] = all(torch.equal(one, before[name]) for name, one in weights(only).items())

    narrow = make_engine(mesh, folder, compute_dtype="bfloat16")
    held = weights(narrow)
    found["masters"] = all(one.dtype == torch.float32 and torch.equal(one, before[n]) for n, one in held.items())
    train(narrow, [0])
    gaps = [(one - whole[f"whole/{name}"]).abs().max() for name, one in weights(narrow).items()]
    return {**found, **whole, "bf16 gap": float(max(gaps))}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [*ENGINES, pytest.param(STAGES, marks=pytest.mark.slow)], ids=str)
def test_steps_are_skipped_together_and_modes_agree(mesh, folders, alone, needs_backend):
    needs_backend(mesh.backend)
    ranks = run_ranks(mesh.world, behave, mesh, folders["qwen3"])
    assert sum(rank["skipped"] for rank in ranks) == 1.0  # the metrics of output ranks are added up
    for rank in ranks:
        assert rank["kept"], "a skipped step changed weights"
        assert rank["recomputed"], "recomputed layers gave another update"
        assert rank["only"]
        assert rank["masters"], "masters should be float32, as read"
        assert rank["bf16 gap"] < 2.5e-2  # one step of AdamW moves a weight by at most lr = 1e-2
    scored = {key: value for rank in ranks for key, value in rank.items() if key.startswith("only/score")}
    assert len(scored) == 7
    for key, value in scored.items():
        torch.testing.assert_close(value, alone[f"qwen3/{key.removeprefix('only/')}"], rtol=1e-5, atol=1e-5)


def accumulate(mesh, folder):
    """Gradients of a batch in two halves, in two calls, are those of the batch."""
    engine = make_engine(mesh, folder)
    batch = make_batch(0)
    mine, loss = own_part(engine, batch), LOSSES["language_model"]
    with engine.train_mode():
        engine.forward_backward(select(batch, mine[:2]), loss)
        engine.forward_backward(select(batch, mine[2:]), loss)
        engine.optimizer_step()
    other = make_engine(mesh, folder)
    train(other, [0])
    first, second = weights(engine), weights(other)
    return {"gap": max(float((first[key] - second[key]).abs().max()) for key in first)}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["megatron", "veomni", "automodel", "torchtitan"])
def test_gradients_add_up_over_calls(backend, folders, needs_backend):
    needs_backend(backend)
    assert all(rank["gap"] < 1e-5 for rank in run_ranks(2, accumulate, Mesh(backend, 2), folders["qwen3"]))


def halve(mesh, folder):
    """The scores after an inference and a change of all weights.

    Nothing reads weights between these: that would drop what an inference has kept gathered.
    """
    engine = make_engine(mesh, folder)
    half = {name: one / 2 for name, one in weights(engine).items()}
    scores(engine)
    engine.blend(half, 1.0)
    return scores(engine)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fsdp2", "megatron", "veomni", "automodel", "torchtitan"])
def test_an_inference_uses_the_newest_weights(backend, folders, needs_backend):
    needs_backend(backend)
    wanted = halve(Mesh("fsdp2", 1), folders["qwen3"])
    found = run_ranks(2, halve, Mesh(backend, 2), folders["qwen3"])
    for key, value in wanted.items():
        (rank,) = [rank for rank in found if key in rank]
        torch.testing.assert_close(rank[key], value, rtol=1e-5, atol=1e-5)


def refused(mesh, folder, settings, message):
    with pytest.raises((ValueError, ModelError)) as error:
        make_engine(mesh, folder, **settings)
    assert message in str(error.value), str(error.value)
    return {}


def refuse_all(bad):
    for one in bad:
        refused(*one)
    return {}


@pytest.mark.slow
def test_bad_settings_are_errors_that_name_them(folders, needs_backend, tmp_path):
    needs_backend("megatron")
    folder = folders["qwen3"]
    bad = [
        (Mesh("megatron", 2, {"tensor": 3}), folder, {}, "tensor = 3 does not divide 2 ranks"),
        (Mesh("megatron", 2, {"context": 2, "pipeline": 2}), folder, {}, "pipeline = 2 does not divide 1 of 2 ranks"),
        (Mesh("megatron", 2, {"sequence": True}), folder, {}, "sequence = true needs"),
        (Mesh("megatron", 2, {"virtual_pipeline": 2}), folder, {}, "virtual_pipeline = 2 needs"),
        (Mesh("megatron", 2), folder, {"model": {"use": {"dropout": 0.1}}}, "megatron does not have use.dropout"),
        (Mesh("megatron", 2), folder, {"model": {"use": {"dropout": "config"}}}, "does not have use.dropout"),
        (Mesh("megatron", 2), folder, {"compute_dtype": "float64"}, "compute_dtype=float64 needs model.dtype=float64"),
        (Mesh("megatron", 2), folder, {"optimizer": {"name": "Muon", "options": {}}}, "Muon orthogonalises"),
    ]
    run_ranks(2, refuse_all, bad)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (Mesh("megatron", 4, {"tensor": 4}), "tensor = 4 does not divide the 2 num_key_value_heads"),
        (Mesh("megatron", 2, {"expert": 2}), "has no experts; leave it at 1"),
        (Mesh("megatron", 2, {"expert_tensor": 2}), "expert_tensor = 2: "),
    ],
    ids=str,
)
def test_a_dimension_that_the_mesh_cannot_cut_is_an_error_with_its_number(mesh, message, folders, needs_backend):
    needs_backend(mesh.backend)
    run_ranks(mesh.world, refuse_all, [(mesh, folders["qwen3"], {}, message)])
