"""Checkpoints go from any engine and mesh to any other, bit for bit; exports load in transformers."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hone.engines.checkpoint.files import MODEL, OPTIMIZER, CheckpointError, PartsReader, load_json
from hone.engines.parts import Whole
from hone.models.loading import without_progress_bars
from tests.engines.contract.cases import Mesh, carry_on, make_engine, train, weights
from tests.ranks import run_ranks

ONE = Mesh("fsdp2", 1)
CHAINS = {
    "two": [Mesh("megatron", 2, {"tensor": 2})],
    "veomni": [Mesh("veomni", 2), Mesh("veomni", 1)],
    "automodel": [
        Mesh("automodel", 2, {"tensor": 2}),
        Mesh("automodel", 2),
        Mesh("automodel", 2, {}, {"models": "automodel"}),
    ],
    "torchtitan": [
        Mesh("torchtitan", 2, {"tensor": 2}),
        Mesh("torchtitan", 2),
        Mesh("fsdp2", 2, {"tensor": 2}),
        Mesh("torchtitan", 4, {"tensor": 2, "sequence": True}),
        Mesh("torchtitan", 1),
    ],
    "stages": [Mesh("megatron", 2), Mesh("megatron", 3, {"pipeline": 3})],
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
    Mesh("megatron", 4, {"expert": 2, "expert_tensor": 2}),
    Mesh("megatron", 4, {"tensor": 2, "sequence": True, "expert": 2}),
    Mesh("megatron", 2, {"pipeline": 2}),
]
LORA = {"rank": 4, "alpha": 8}
ON_EXPERTS = {**LORA, "targets": ("q_proj", "experts.gate_up_proj", "experts.down_proj")}
CHAIN_OF_ADAPTERS = [
    Mesh("megatron", 2, {"tensor": 2}),
    Mesh("megatron", 4, {"tensor": 2, "sequence": True, "pipeline": 2}),
    Mesh("fsdp2", 2, {"tensor": 2}),
    Mesh("megatron", 2),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", pytest.param("qwen3-untied", marks=pytest.mark.slow)])
@pytest.mark.parametrize("chain", ["two", *(pytest.param(name, marks=pytest.mark.slow) for name in list(CHAINS)[1:])])
def test_a_checkpoint_goes_through_every_engine_bit_for_bit(chain, name, folders, tmp_path, needs_backend):
    """fsdp2 in one process -> meshes -> fsdp2 in one process; from each, one more step gives the same."""
    _go_through(CHAINS[chain], folders[name], tmp_path, needs_backend)


@pytest.mark.slow
def test_experts_go_through_every_engine_bit_for_bit(folders, tmp_path, needs_backend):
    _go_through(CHAINS_OF_EXPERTS, folders["qwen3_moe"], tmp_path, needs_backend)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "glm4_moe", "deepseek_v3", "gpt_oss"])
def test_architectures_go_through_every_engine_bit_for_bit(name, folders, tmp_path, needs_backend):
    chain = [Mesh("megatron", 2, {"tensor": 2, "sequence": True, "expert": 2}), Mesh("megatron", 2, {"pipeline": 2})]
    chain += [Mesh("megatron", 2, {"expert_tensor": 2})] if name in ("mixtral", "gpt_oss") else []
    _go_through(chain, folders[name], tmp_path, needs_backend)


@pytest.mark.slow
def test_an_adapter_goes_through_every_engine_bit_for_bit(folders, tmp_path, needs_backend):
    _go_through(CHAIN_OF_ADAPTERS, folders["qwen2"], tmp_path, needs_backend, {"lora": LORA})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_an_adapter_on_experts_goes_through_every_engine_bit_for_bit(name, folders, tmp_path, needs_backend):
    _go_through(CHAINS_OF_EXPERTS, folders[name], tmp_path, needs_backend, {"lora": ON_EXPERTS})


def _go_through(chain, model, tmp_path, needs_backend, settings=None):
    settings = settings or {}
    for mesh in chain:
        needs_backend(mesh.backend)

    def folder(number):
        made = tmp_path / str(number)
        made.mkdir()
        return made

    first = folder(0)
    carry_on(ONE, model, "", str(first), settings)
    last = first
    for number, mesh in enumerate(chain, 1):
        now = folder(number)
        found = run_ranks(mesh.world, carry_on, mesh, model, str(last), str(now), settings)
        _assert_same(first, now)
        _assert_exported(now / "export", found[0])
        last = now
    back = folder("back")
    again = carry_on(ONE, model, str(last), str(back), settings)
    _assert_same(first, back)
    left = carry_on(ONE, model, str(first), str(folder("left")), settings)
    assert all(torch.equal(left[key], again[key]) for key in left if key != "steps")
    for key in {key for key in left if not key.startswith("saved/")} - {"steps"}:
        torch.testing.assert_close(found[0][key], left[key], rtol=1e-5, atol=1e-5)


def _assert_exported(folder, found):
    with without_progress_bars():
        loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert [key for key in loaded if not torch.equal(loaded[key], found[f"saved/{key}"])] == []


def resume(mesh, folder, saved, settings):
    """Three steps, a checkpoint after the first; then the last two again, from it."""
    engine = make_engine(mesh, folder, **settings)
    train(engine, [0])
    engine.save_checkpoint(Path(saved))
    steps = train(engine, [1, 2])
    other = make_engine(mesh, folder, **settings)
    other.load_checkpoint(Path(saved))
    again = train(other, [1, 2])
    assert steps == again
    first, second = weights(engine), weights(other)
    assert all(torch.equal(first[key], second[key]) for key in first)
    return {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        Mesh("fsdp2", 2),
        Mesh("megatron", 2),
        Mesh("veomni", 2),
        Mesh("automodel", 2),
        Mesh("torchtitan", 2, {"tensor": 2}),
    ],
    ids=str,
)
def test_a_resumed_engine_goes_on_bit_for_bit(mesh, folders, tmp_path, needs_backend):
    needs_backend(mesh.backend)
    run_ranks(mesh.world, resume, mesh, folders["qwen3"], str(tmp_path), {})


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [Mesh("megatron", 2, {"expert": 2}), Mesh("megatron", 2, {"expert_tensor": 2})], ids=str
)
def test_a_resumed_adapter_on_experts_goes_on_bit_for_bit(mesh, folders, tmp_path, needs_backend):
    needs_backend(mesh.backend)
    run_ranks(mesh.world, resume, mesh, folders["qwen3_moe"], str(tmp_path), {"lora": ON_EXPERTS})


def refuse_another(mesh, folder, saved):
    engine = make_engine(mesh, folder)
    with pytest.raises(CheckpointError, match="belong to another model"):
        engine.load_checkpoint(Path(saved))
    return {}


@pytest.mark.slow
def test_the_checkpoint_of_another_model_is_refused(folders, tmp_path, needs_backend):
    needs_backend("megatron")
    carry_on(ONE, folders["qwen3"], "", str(tmp_path), {})
    run_ranks(2, refuse_another, Mesh("megatron", 2, {"pipeline": 2}), folders["llama"], str(tmp_path))
