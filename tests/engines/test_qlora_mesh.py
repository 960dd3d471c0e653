"""Adapters beside layers in 4 bits on meshes of real processes: all is as in one process."""

import dataclasses

import pytest
import torch

from hone.engines.checkpoint.files import MODEL
from hone.engines.lora.adapter_files import AdapterError
from hone.models.four_bit import FourBitLinear
from hone.models.loading import load_language_model, without_progress_bars
from hone.models.settings import BuildConfig, ModelConfig
from hone.models.tokenizer import build_tokenizer
from tests.engines.spread import SIZES, make_engine
from tests.engines.test_lora_mesh import MOE, VALUE, _whole, case, save_adapters, train_several
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

pytest.importorskip("bitsandbytes", reason="comes with hone-rl[qlora]")

NF4 = {"quantise": {}}
ON_DISK = BuildConfig(**SIZES, kv_heads=2, tie_embeddings=False)
CASES = {  # the first ones are read from files
    "dp": case(lora=NF4),
    "values": case(**VALUE, lora=NF4),
    "sp fp4": case(parallel={"sequence": 2}, lora={"quantise": {"kind": "fp4", "double": False}}),
    "dora": case(lora={**NF4, "dora": True}, activation_checkpointing=True),
    "whole": case(lora={**NF4, "modules_to_save": ("lm_head", "layers.0.mlp"), "init": "pissa"}),
    "hsdp, built": case(lora=NF4, parallel={"replicate": 2}),
    "moe, built": case(**MOE, lora=NF4, parallel={"expert": 2}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("base")
    with without_progress_bars():
        load_language_model(ModelConfig(build=ON_DISK)).save_pretrained(path)
    build_tokenizer(ON_DISK).save_pretrained(path)
    return str(path)


def placed(folder):
    return {
        name: one if "built" in name else dataclasses.replace(one, model={"path": folder})
        for name, one in CASES.items()
    }


@pytest.fixture(scope="module")
def spread(folder):
    return run_ranks(2, train_several, list(placed(folder).values()))


@pytest.mark.parametrize("name", CASES)
def test_training_equals_that_of_one_process(name, folder, spread):
    one = dataclasses.replace(placed(folder)[name], parallel={})
    alone = train_several([one])
    number = list(CASES).index(name)
    for rank in spread:
        mine = {f"0/{key.partition('/')[2]}": value for key, value in rank.items() if key.startswith(f"{number}/")}
        tensors = {key for key, value in alone.items() if isinstance(value, torch.Tensor)}
        assert {key for key, value in mine.items() if isinstance(value, torch.Tensor)} == tensors
        for key in tensors:
            torch.testing.assert_close(mine[key], alone[key], rtol=1e-5, atol=1e-5, msg=lambda m, n=key: f"{n}: {m}")
        assert mine["0/norms"] == pytest.approx(alone["0/norms"], rel=1e-5, abs=1e-5)


def bits(one) -> dict:
    """What a rank holds of the layers in 4 bits."""
    engine = make_engine(one)
    layers = {name: layer for name, layer in engine.model.named_modules() if isinstance(layer, FourBitLinear)}
    held = [name for name, _, _ in engine.weights.parts()]
    return {name: layer.packed for name, layer in layers.items()} | {"params": held}


def test_each_rank_holds_the_bits_whole(folder):
    one = placed(folder)["dp"]
    alone = bits(one)
    for rank in run_ranks(2, bits, one):
        assert rank.keys() == alone.keys()
        assert all(torch.equal(rank[name], alone[name]) for name in alone if name != "params")
        assert not any("proj.weight" in name or "proj.base_layer.weight" in name for name in rank["params"])


def refused(one) -> dict:
    with pytest.raises(AdapterError) as error:
        make_engine(one)
    return {"said": str(error.value)}


def test_tensor_parallel_is_refused():
    for rank in run_ranks(2, refused, case(lora=NF4, parallel={"tensor": 2})):
        assert rank["said"].startswith("lora.quantise: parallel.tensor cannot cut layers in 4 bits")


def test_an_adapter_goes_from_mesh_to_mesh_bit_for_bit(folder, tmp_path):
    cases = [dataclasses.replace(placed(folder)["dp"], parallel=one) for one in ({}, {"sequence": 2})]
    names = ["one", "dp", "sp", "again"]
    place = {name: str(tmp_path / name) for name in names}
    alone = save_adapters([(cases[0], "", place["one"])])
    spread = run_ranks(2, save_adapters, [(cases[0], place["one"], place["dp"]), (cases[1], place["dp"], place["sp"])])
    last = save_adapters([(cases[0], place["sp"], place["again"])])
    for rank in [*spread, last]:
        for name, tensor in rank.items():
            assert torch.equal(tensor, alone["0/" + name.partition("/")[2]]), name
    first = _whole(tmp_path / "one", MODEL)
    for name in names[1:]:
        found = _whole(tmp_path / name, MODEL)
        assert found.keys() == first.keys()
        assert all(torch.equal(found[key], first[key]) for key in first)
