"""Parts of a model's files that its class does not read, and those that it reads by other names."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hone.models.errors import ModelError
from hone.models.files.left_out import left_out

SIZES = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32}
MIXTURE = {**SIZES, "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
KINDS = {
    "gpt2": ({"n_embd": 16, "n_head": 2, "n_layer": 2, "vocab_size": 32}, "h.0.attn.c_attn.bias h.0.attn.bias", {}),
    "glm4_moe": (
        {**MIXTURE, "num_hidden_layers": 48, "first_k_dense_replace": 46},
        "model.layers.46.mlp.experts.0.up_proj.weight model.layers.46.input_layernorm.weight",
        {},
    ),
    "deepseek_v3": (
        {**MIXTURE, "num_hidden_layers": 2},
        "model.layers.1.mlp.experts.0.up_proj.weight model.layers.61.mlp.up.weight model.layers.61.eh_proj.weight",
        {"model.layers.61": 2},
    ),
    "qwen3_5_text": (
        {**SIZES, "num_hidden_layers": 2, "head_dim": 8},
        "model.language_model.layers.0.mlp.up_proj.weight model.visual.patch_embed.bias mtp.fc.weight mtp.norm.weight",
        {"model.visual": 1, "mtp": 2},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_named_that_no_module_reads(kind, tmp_path):
    """Older files lack a prefix; experts are apart in the files; layers beyond the last are heads."""
    options, names, expected = KINDS[kind]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names.split(), "model.safetensors")}))
    assert left_out(tmp_path, model) == expected


def test_an_index_without_a_map_is_one_sentence(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_layer=1, n_embd=8, n_head=1))
    with pytest.raises(ModelError, match=r"index.json has no weight_map"):
        left_out(tmp_path, model)
