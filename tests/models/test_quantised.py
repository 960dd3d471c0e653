"""Quantised checkpoints: values worked out from their format by hand, or one sentence."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hone.models.errors import ModelError
from hone.models.loading import load_language_model, without_progress_bars
from hone.models.settings import BuildConfig, ModelConfig
from hone.models.tokenizer import load_tokenizer
from hone.trainers.run.run_model import local_model

SIZES = {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 2, "head_size": 16, "mlp_size": 32}
NIBBLES = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
)  # what the low three bits of a 4-bit float mean; the fourth is the sign


def write(folder, architecture, quantisation, change, **options):
    """A checkpoint whose tensors `change(name, tensor)` has turned into several; what each stands for."""
    build = ModelConfig(build=BuildConfig(**SIZES, architecture=architecture, options=options, tie_embeddings=False))
    with without_progress_bars():
        load_language_model(build).save_pretrained(folder)
    load_tokenizer(build).save_pretrained(folder)
    path = folder / "model.safetensors"
    stored, truth = {}, {}
    for name, tensor in load_file(path).items():
        parts, meant = change(name, tensor)
        stored |= parts
        truth[name] = meant
    save_file(stored, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantisation}))
    return truth


def mxfp4(name, tensor):
    """Expert matrices as gpt-oss is published: 32 numbers of 4 bits share a power of two; rows lie along the input."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: tensor}, tensor
    experts, inputs, outputs = tensor.shape
    codes = torch.randint(0, 16, (experts, outputs, inputs // 32, 32))
    exponents = torch.randint(120, 126, (experts, outputs, inputs // 32), dtype=torch.uint8)
    signs = torch.where(codes >= 8, -1.0, 1.0)
    values = signs * torch.tensor(NIBBLES)[codes % 8] * 2.0 ** (exponents.float() - 127)[..., None]
    packed = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    meant = values.reshape(experts, outputs, inputs).transpose(1, 2)
    return {f"{name}_blocks": packed, f"{name}_scales": exponents}, meant


def fp8(name, tensor):
    """Matrices as DeepSeek-V3 is published: 8-bit floats, with a factor for each block."""
    if "_proj" not in name:
        return {name: tensor}, tensor
    block = 16
    factors = torch.rand(-(-tensor.shape[0] // block), -(-tensor.shape[1] // block)) * 0.01 + 0.01
    each = factors.repeat_interleave(block, 0).repeat_interleave(block, 1)[: tensor.shape[0], : tensor.shape[1]]
    small = (tensor / each).to(torch.float8_e4m3fn)
    return {name: small, f"{name}_scale_inv": factors}, small.float() * each


FORMATS = {
    "mxfp4": ("gpt_oss", {"quant_method": "mxfp4"}, mxfp4, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "fp8": ("qwen3", {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}, fp8, {}),
}


@pytest.mark.filterwarnings("ignore")  # transformers mentions kernels that are not installed
@pytest.mark.parametrize("name", FORMATS)
def test_it_is_dequantised_to_what_it_stands_for(name, tmp_path):
    architecture, quantisation, change, options = FORMATS[name]
    if architecture == "gpt_oss":
        options = {**options, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    truth = write(tmp_path / "stored", architecture, quantisation, change, **options)
    own = local_model(ModelConfig(path=str(tmp_path / "stored")), tmp_path / "run" / "model")
    assert own.path == str(tmp_path / "run" / "model")
    assert "quantization_config" not in json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    again = local_model(ModelConfig(path=str(tmp_path / "stored")), tmp_path / "run" / "model")
    for found in (load_language_model(ModelConfig(path=str(tmp_path / "stored"))), load_language_model(again)):
        state = found.state_dict()
        assert {tensor.dtype for tensor in state.values()} == {torch.float32}
        for weight, meant in truth.items():
            torch.testing.assert_close(state[weight], meant, rtol=2**-8, atol=0)  # transformers goes through bfloat16


METHODS = {
    "gptq": {"quant_method": "gptq", "bits": 4},
    "awq": {"quant_method": "awq", "bits": 4},
    "bitsandbytes": {"load_in_4bit": True},
    "compressed-tensors": {"quant_method": "compressed-tensors"},
}


@pytest.mark.parametrize("method", METHODS)
def test_what_cannot_be_dequantised_is_refused(method, tmp_path):
    write(tmp_path, "qwen3", METHODS[method], lambda name, tensor: ({name: tensor}, tensor))
    with pytest.raises(ModelError, match=rf"is quantised \({method}\), and such weights cannot be trained"):
        load_language_model(ModelConfig(path=str(tmp_path)))


def test_it_is_not_read_shard_by_shard(tmp_path):
    architecture, quantisation, change, options = FORMATS["fp8"]
    write(tmp_path, architecture, quantisation, change, **options)
    with pytest.raises(ModelError, match="cannot be read shard by shard"):
        load_language_model(ModelConfig(path=str(tmp_path)), shard=lambda model: None)


def test_a_config_that_forgets_the_quantisation_is_noticed(tmp_path):
    architecture, _, change, options = FORMATS["fp8"]
    write(tmp_path, architecture, None, change, **options)
    with pytest.raises(ModelError, match=r"has quantised weights \(model\.layers\.0\.\S+_scale_inv, 7 in total\)"):
        load_language_model(ModelConfig(path=str(tmp_path)))
