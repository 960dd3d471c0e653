"""Linear layers in 4 bits: the values are bitsandbytes' own, the product and its gradient those of a plain layer."""

import copy
import sys

import pytest
import torch
from torch import nn

from hone.models.errors import ModelError
from hone.models.four_bit import FourBitLinear, chosen_layers, plain_weights, quantise
from hone.models.loading import load_language_model, load_value_model, without_progress_bars
from hone.models.settings import BuildConfig, FourBitConfig, ModelConfig

bitsandbytes = pytest.importorskip("bitsandbytes", reason="comes with hone-rl[qlora]")

BUILD = BuildConfig(hidden_size=32, layers=2, heads=4, kv_heads=2, mlp_size=48, max_positions=64)
PROJECTIONS = 7  # of a layer
KINDS = [FourBitConfig(), FourBitConfig(double=False), FourBitConfig(kind="fp4")]
every_kind = pytest.mark.parametrize("config", KINDS, ids=["nf4", "nf4, once", "fp4"])


@pytest.fixture
def folder(tmp_path):
    with without_progress_bars():
        load_language_model(ModelConfig(build=BUILD)).save_pretrained(tmp_path)
    return tmp_path


def four_bit_layers(model):
    return {name: one for name, one in model.named_modules() if isinstance(one, FourBitLinear)}


def theirs(weight, config):
    """What bitsandbytes quantises to, and what that stands for: 16 levels times the largest of each block of 64."""
    tools = bitsandbytes.functional
    packed, state = tools.quantize_4bit(weight, blocksize=64, compress_statistics=config.double, quant_type=config.kind)
    absmax = state.absmax
    if config.double:
        absmax = tools.dequantize_blockwise(state.absmax, state.state2) + state.offset
    both = packed.view(-1).int()
    levels = tools.get_4bit_type(config.kind, device="cpu")[torch.stack([both >> 4, both & 15], 1).view(-1)]
    return packed, (levels.view(-1, 64) * absmax[:, None]).view(weight.shape).to(weight.dtype)


@every_kind
def test_where_rows_are_whole_blocks_bitsandbytes_reads_the_same(config):
    """Of others its kernel for CPUs makes something else (0.50.2), which is why the layer does not show it any."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(128, 40, bias=False)})
    model.get_output_embeddings = lambda: None
    weight = model["a"].weight.data
    tools = bitsandbytes.functional
    theirs = tools.quantize_4bit(weight, blocksize=64, compress_statistics=config.double, quant_type=config.kind)
    quantise(model, config, "made")
    assert torch.equal(model["a"].weight, tools.dequantize_4bit(*theirs))


@every_kind
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_those_of_bitsandbytes_from_files_and_in_memory(folder, config, dtype):
    plain = load_language_model(ModelConfig(path=str(folder), dtype=dtype))
    read = load_language_model(ModelConfig(path=str(folder), dtype=dtype), four_bit=config)
    made = copy.deepcopy(plain)
    quantise(made, config, "made")
    for model in (read, made):
        layers = four_bit_layers(model)
        assert len(layers) == 2 * PROJECTIONS
        for name, layer in layers.items():
            packed, expected = theirs(plain.get_submodule(name).weight.data, config)
            assert torch.equal(layer.packed, packed), name
            assert torch.equal(layer.weight, expected), name
            assert layer.weight.dtype == plain.dtype
        others = {name for name, _ in model.named_parameters()}
        assert all("proj" not in name for name in others)
        assert all(torch.equal(model.get_parameter(name), plain.get_parameter(name)) for name in others)


def test_weights_by_hand():
    """Two blocks of 64: their largest values are kept, and 0; all others are one of 16 levels times the largest."""
    model = load_language_model(ModelConfig(build=BUILD))
    layer = model.model.layers[0].self_attn.q_proj
    layer.weight.data[:4] = torch.linspace(-0.3, 0.3, 128).view(4, 32)
    layer.weight.data[0, 5] = 0
    quantise(model, FourBitConfig(double=False), "made")
    first, second = layer.weight[:4].reshape(2, 64)
    assert (first[0], second[-1]) == (pytest.approx(-0.3), pytest.approx(0.3))
    assert first[5] == 0
    levels = (first / 0.3).unique()
    nf4 = [-1, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0]  # arXiv 2305.14314, E
    torch.testing.assert_close(levels, torch.tensor(nf4), rtol=0, atol=1e-6)


@every_kind
def test_product_and_gradient_are_those_of_the_plain_weight(config):
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(48, 30)})
    model.get_output_embeddings = lambda: None
    quantise(model, config, "made")
    layer = model["a"]
    x = torch.randn(5, 48, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    weight = layer.weight
    out, expected = layer(x), torch.nn.functional.linear(other, weight, layer.bias)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    direction = torch.randn(5, 30)
    (out * direction).sum().backward()
    (expected * direction).sum().backward()
    torch.testing.assert_close(x.grad, other.grad, rtol=0, atol=1e-6)


def test_nothing_plain_is_kept_for_the_backward():
    model = nn.ModuleDict({"a": nn.Linear(64, 64, bias=False)})
    model.get_output_embeddings = lambda: None
    quantise(model, FourBitConfig(), "made")
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        model["a"](torch.randn(5, 64, requires_grad=True))
    assert not kept


def test_memory_is_that_of_four_bits_and_a_bit():
    model = nn.ModuleDict({"a": nn.Linear(512, 1024, bias=False)})
    model.get_output_embeddings = lambda: None
    once, twice = copy.deepcopy(model), copy.deepcopy(model)
    quantise(once, FourBitConfig(double=False), "made")
    quantise(twice, FourBitConfig(), "made")
    count = 512 * 1024
    assert once["a"].bytes() == count // 2 + 4 * count // 64
    codes = 4 * 256 + 4  # the 256 values of 8 bits, and an offset
    assert twice["a"].bytes() == count // 2 + count // 64 + 4 * count // (64 * 256) + codes
    assert not any(one.numel() for one in once.parameters())


def test_asking_does_not_change_what_is_computed():
    """bitsandbytes' own layer packs its weights anew for CPUs in `eval`, and computes in bfloat16 from then on."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(64, 64, bias=False)})
    model.get_output_embeddings = lambda: None
    quantise(model, FourBitConfig(), "made")
    x = torch.randn(3, 64)
    trained = model.train()["a"](x.clone().requires_grad_()).detach()
    with torch.no_grad():
        assert torch.equal(model.eval()["a"](x), trained)


def test_the_state_dict_has_the_bits_and_plain_weights_what_they_stand_for(folder):
    model = load_language_model(ModelConfig(path=str(folder)), four_bit=FourBitConfig())
    whole = load_language_model(ModelConfig(path=str(folder))).state_dict()
    plain = dict(plain_weights(model, model.state_dict().items()))
    assert list(plain) == list(whole)
    for name, weight in plain.items():
        assert weight.shape == whole[name].shape
        assert weight.dtype == whole[name].dtype
        largest = whole[name].abs().max()
        assert (weight - whole[name]).abs().max() <= 0.16 * largest, "half of the widest step between two levels"
    assert not hasattr(model.config, "quantization_config")


def test_a_value_model_has_its_body_in_four_bits(folder):
    model = load_value_model(ModelConfig(path=str(folder)), four_bit=FourBitConfig())
    assert len(four_bit_layers(model)) == 2 * PROJECTIONS
    assert not isinstance(model.score, FourBitLinear)


def test_layers_are_left_out_by_name(folder):
    config = FourBitConfig(skip=("o_proj", "layers.0.mlp"))
    model = load_language_model(ModelConfig(path=str(folder)), four_bit=config)
    made = load_language_model(ModelConfig(build=BUILD), four_bit=config)
    names = set(four_bit_layers(model))
    assert names == set(four_bit_layers(made))
    assert len(names) == 2 * PROJECTIONS - 2 - 3
    assert not any("o_proj" in name or "layers.0.mlp" in name for name in names)
    said = r"lora\.quantise\.skip or modules_to_save: unknown layer of .*'o_prj'; did you mean 'o_proj'\?"
    with pytest.raises(ModelError, match=said):
        load_language_model(ModelConfig(path=str(folder)), four_bit=FourBitConfig(skip=("o_prj",)))


def test_what_cannot_be_held_so_is_refused(folder, monkeypatch):
    gpt2 = BuildConfig(hidden_size=32, layers=1, heads=4, architecture="gpt2")
    with pytest.raises(ModelError, match="'gpt2' has no linear layer"):
        load_language_model(ModelConfig(build=gpt2), four_bit=FourBitConfig())
    head = load_language_model(ModelConfig(build=BUILD)).get_output_embeddings()
    model = load_language_model(ModelConfig(build=BUILD))
    assert all(one is not head for _, one in chosen_layers(model, FourBitConfig(), "made"))
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ModelError, match=r"needs the package bitsandbytes: pip install 'bitsandbytes>=0.50'"):
        load_language_model(ModelConfig(path=str(folder)), four_bit=FourBitConfig())
