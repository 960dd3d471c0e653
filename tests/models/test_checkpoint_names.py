"""Weights in the layout of a model's files: the experts that transformers fuses come one by one."""

import pytest
import torch
from transformers import AutoConfig
from transformers.core_model_loading import revert_weight_conversion

from hone.models.checkpoint_names import as_in_files, layout_of
from hone.models.loading import load_language_model
from hone.models.settings import ModelConfig
from tests.families.families import FAMILIES, save

MIXTURES = [name for name, family in FAMILIES.items() if family.experts]
EXPERT = 64 * 32 * 4  # bytes of one of Qwen3-MoE's matrices


@pytest.fixture(params=MIXTURES)
def model(request, tmp_path):
    folder = save(FAMILIES[request.param], tmp_path / "model")
    return AutoConfig.from_pretrained(folder), load_language_model(ModelConfig(path=str(folder)))


@pytest.mark.parametrize("slice_bytes", [1, 3 * 64 * 64 * 4, 2**30])
def test_slices_of_any_size_give_what_the_whole_model_gives(model, slice_bytes):
    config, module = model
    want = revert_weight_conversion(module, module.state_dict())
    found = list(layout_of(config).convert(module.state_dict().items(), slice_bytes))
    assert len(found) == len(want)
    assert all(torch.equal(tensor, want[name]) for name, tensor in found)
    assert {name: tensor.shape for name, tensor in found} == layout_of(config).shapes


def test_a_layout_is_converted_once(model):
    config, module = model
    once = dict(as_in_files(config, module.state_dict().items()))
    twice = dict(as_in_files(config, once.items()))
    assert list(twice) == list(once)
    assert all(twice[name] is once[name] for name in once)


def test_experts_come_one_after_the_other_and_none_is_larger_than_its_matrix(tmp_path):
    folder = save(FAMILIES["Qwen3-MoE"], tmp_path / "model")
    config, module = AutoConfig.from_pretrained(folder), load_language_model(ModelConfig(path=str(folder)))
    fused = {name: one for name, one in module.state_dict().items() if ".experts." in name}
    assert max(one.nbytes for one in fused.values()) == 8 * EXPERT  # 4 experts, gate and up
    found = list(layout_of(config).convert(fused.items(), 1))
    assert [name.partition(".experts.")[2] for name, _ in found[:4]] == [
        "0.gate_proj.weight",
        "0.up_proj.weight",
        "1.gate_proj.weight",
        "1.up_proj.weight",
    ]
    assert {one.nbytes for _, one in found} == {EXPERT}
