"""Checkpoints go from any engine and mesh to any other, bit for bit; exports load in transformers."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hone.engines.checkpoint import MODEL, OPTIMIZER, CheckpointError, PartsReader, load_json
from hone.engines.parts import Whole
from hone.models.loading import without_progress_bars
from tests.engines.contract.cases import Mesh, carry_on, make_engine, train, weights
from tests.ranks import run_ranks

ONE = Mesh("fsdp2", 1)
CHAINS = {
    "two": [Mesh("megatron", 2, {"tensor": 2})],
    "stages": [Mesh("megatron", 2), Mesh("megatron", 2, {"pipeline": 2})],
    "four": [
        Mesh("fsdp2", 2, {"tensor": 2}),
        Mesh("megatron", 4, {"tensor": 2, "sequence": True}),
        Mesh("megatron", 4, {"pipeline": 2}),
        Mesh("megatron", 4, {"tensor": 2, "context": 2}),
        Mesh("megatron", 2, {"pipeline": 2, "virtual_pipeline": 2}),
        Mesh("megatron", 1),
    ],
}


def _whole(folder, kind):
    reader = PartsReader(folder, kind, load_json(folder / "engine.json")["ranks"])
    return {name: reader.read(name, Whole(shape)) for name, shape in reader.shapes.items()}


def _assert_same(one, other):
    for kind in (MODEL, OPTIMIZER):
        a, b = _whole(one, kind), _whole(other, kind)
        assert a.keys() == b.keys()
        assert [name for name in a if not torch.equal(a[name], b[name])] == []


CHAINS_OF_EXPERTS = [
    Mesh("megatron", 2, {"expert": 2}),
    Mesh("megatron", 4, {"tensor": 2, "sequence": True, "expert": 2}),
    Mesh("megatron", 2, {"pipeline": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", pytest.param("qwen3-untied", marks=pytest.mark.slow)])
@pytest.mark.parametrize("chain", ["two", *(pytest.param(name, marks=pytest.mark.slow) for name in ("stages", "four"))])
def test_a_checkpoint_goes_through_every_engine_bit_for_bit(chain, name, folders, tmp_path, needs_backend):
    """fsdp2 in one process -> meshes -> fsdp2 in one process; from each, one more step gives the same."""
    _go_through(CHAINS[chain], folders[name], tmp_path, needs_backend)


@pytest.mark.slow
def test_experts_go_through_every_engine_bit_for_bit(folders, tmp_path, needs_backend):
    _go_through(CHAINS_OF_EXPERTS, folders["qwen3_moe"], tmp_path, needs_backend)


def _go_through(chain, model, tmp_path, needs_backend):
    for mesh in chain:
        needs_backend(mesh.backend)

    def folder(number):
        made = tmp_path / str(number)
        made.mkdir()
        return made

    first = folder(0)
    carry_on(ONE, model, "", str(first))
    last = first
    for number, mesh in enumerate(chain, 1):
        now = folder(number)
        found = run_ranks(mesh.world, carry_on, mesh, model, str(last), str(now))
        _assert_same(first, now)
        _assert_exported(now / "export", found[0])
        last = now
    back = folder("back")
    again = carry_on(ONE, model, str(last), str(back))
    _assert_same(first, back)
    left = carry_on(ONE, model, str(first), str(folder("left")))
    assert all(torch.equal(left[key], again[key]) for key in left if key != "steps")
    for key in {key for key in left if not key.startswith("saved/")} - {"steps"}:
        torch.testing.assert_close(found[0][key], left[key], rtol=1e-5, atol=1e-5)


def _assert_exported(folder, found):
    with without_progress_bars():
        loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert [key for key in loaded if not torch.equal(loaded[key], found[f"saved/{key}"])] == []


def resume(mesh, folder, saved):
    """Three steps, a checkpoint after the first; then the last two again, from it."""

    engine = make_engine(mesh, folder)
    train(engine, [0])
    engine.save_checkpoint(Path(saved))
    steps = train(engine, [1, 2])
    other = make_engine(mesh, folder)
    other.load_checkpoint(Path(saved))
    again = train(other, [1, 2])
    assert steps == again
    first, second = weights(engine), weights(other)
    assert all(torch.equal(first[key], second[key]) for key in first)
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh("fsdp2", 2), Mesh("megatron", 2)], ids=str)
def test_a_resumed_engine_goes_on_bit_for_bit(mesh, folders, tmp_path, needs_backend):
    needs_backend(mesh.backend)
    run_ranks(mesh.world, resume, mesh, folders["qwen3"], str(tmp_path))


def refuse_another(mesh, folder, saved):
    engine = make_engine(mesh, folder)
    with pytest.raises(CheckpointError, match="belong to another model"):
        engine.load_checkpoint(Path(saved))
    return {}


@pytest.mark.slow
def test_the_checkpoint_of_another_model_is_refused(folders, tmp_path, needs_backend):
    needs_backend("megatron")
    carry_on(ONE, folders["qwen3"], "", str(tmp_path))
    run_ranks(2, refuse_another, Mesh("megatron", 2, {"pipeline": 2}), folders["llama"], str(tmp_path))
