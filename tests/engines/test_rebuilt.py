"""What engines that compute a model in modules of their own take from its files, and what they refuse."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hone.engines.rebuilt.configs import padding_token, windows_of
from hone.engines.rebuilt.reading import Region, open_model
from hone.models.errors import ModelError
from hone.models.settings import ModelConfig
from tests.engines.contract.cases import save_model


@pytest.mark.parametrize(
    ("kind", "layers", "windows"),
    [
        ("llama", {}, (None, None)),  # its attention ignores the key
        ("glm4_moe", {}, (None, None)),
        ("mistral", {}, (6, 6)),
        ("mixtral", {}, (6, 6)),
        ("qwen3_moe", {"use_sliding_window": True}, (6, 6)),
        ("qwen3_moe", {"use_sliding_window": False}, (None, None)),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 1}, (None, 6)),
        ("gpt_oss", {"layer_types": ["sliding_attention", "full_attention"]}, (6, None)),
    ],
)
def test_windows_are_those_of_transformers(kind, layers, windows):
    config = CONFIG_MAPPING[kind](num_hidden_layers=2, **layers)
    config.sliding_window = 6 if layers.get("use_sliding_window", True) else config.sliding_window
    assert windows_of(config) == windows


@pytest.mark.parametrize(("token", "row"), [(None, None), (0, 0), (5, 5), (-1, 99)])
def test_the_padding_token_is_that_of_the_embedding(token, row):
    config = CONFIG_MAPPING["llama"](vocab_size=100, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    config.pad_token_id = token
    assert padding_token(config) == row
    with torch.device("meta"):
        assert AutoModelForCausalLM.from_config(config).get_input_embeddings().padding_idx == row


def changed(folder, change):
    """Change the weights of a model's folder."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, {"format": "pt"})


def opened(folder, **use):
    return open_model(ModelConfig(path=str(folder), use=use), False)


def test_tied_weights_that_differ_in_the_files_are_refused(tmp_path):
    save_model("qwen3", tmp_path)
    embedding = "model.embed_tokens.weight"
    changed(tmp_path, lambda weights: weights.update({"lm_head.weight": weights[embedding].clone()}))
    _, reader = opened(tmp_path)
    whole = tuple(load_file(tmp_path / "model.safetensors")[embedding].shape)
    assert reader.read(Region("lm_head.weight", whole, (0, 0), whole)).shape == whole
    changed(tmp_path, lambda weights: weights["lm_head.weight"].add_(1))
    with pytest.raises(ModelError, match=r"tie_word_embeddings=true, and lm_head.weight differs from model.embed_tok"):
        opened(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert opened(tmp_path)[0].config.tie_word_embeddings is False


def test_scales_of_a_quantisation_without_a_name_are_refused(tmp_path):
    save_model("llama", tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight_scale_inv"
    changed(tmp_path, lambda weights: weights.update({name: torch.ones(1)}))
    with pytest.raises(ModelError, match=rf"has quantised weights \({name}, 1 in total\)"):
        opened(tmp_path)


def test_a_context_that_nothing_uses_is_refused(tmp_path):
    save_model("qwen3", tmp_path)
    with pytest.raises(ModelError, match=r"model.use.context=32 .*; remove it"):
        opened(tmp_path, context=32)
