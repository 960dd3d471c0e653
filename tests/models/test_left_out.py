"""Parts of a model's files that its class does not read, and those that it reads by other names."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hone.models.errors import ModelError
from hone.models.files.left_out import INDEX, left_out, read_index
from hone.models.loading import load_language_model
from hone.models.settings import BuildConfig, ModelConfig
from hone.planner.anatomy import examine

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
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names.split(), "model.safetensors")}))
    assert left_out(tmp_path, model) == expected


@pytest.mark.parametrize(
    "text", ["{}", "[]", "null", '{"weight_map": []}', '{"weight_map": {"a": 3}}', '{"weight', "[" * 100_000]
)
def test_a_damaged_index_is_one_sentence(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ModelError, match=r"index.json is damaged: ") as raised:
        read_index(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("metadata", ["null", '{"total_size": "z"}', "[]", '{"total_size": 1e999}'])
def test_an_index_may_lack_the_size(tmp_path, metadata):
    (tmp_path / INDEX).write_text(f'{{"weight_map": {{"a": "b"}}, "metadata": {metadata}}}')
    assert read_index(tmp_path) == ({"a": "b"}, 0)


def test_an_index_beside_a_whole_file_is_not_read(tmp_path):
    """transformers does not read it either, so what it says, or that it is damaged, is of no account."""
    model = ModelConfig(build=BuildConfig(hidden_size=16, layers=1, heads=2, mlp_size=16, max_positions=16))
    load_language_model(model).save_pretrained(tmp_path)
    (tmp_path / INDEX).write_text("{}")
    assert read_index(tmp_path) is None
    anatomy = examine(ModelConfig(path=str(tmp_path)))
    assert (anatomy.files.count, anatomy.files.left_out) == (1, {})
    load_language_model(ModelConfig(path=str(tmp_path)))


def test_a_file_that_the_index_names_and_the_folder_lacks_is_named(tmp_path):
    """A download that was stopped, on a disk: found before a run. Without any weights, they are still on a hub."""
    model = ModelConfig(build=BuildConfig(hidden_size=16, layers=2, heads=2, mlp_size=16, max_positions=16))
    load_language_model(model).save_pretrained(tmp_path, max_shard_size="4KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    for shard in shards[1:]:
        shard.unlink()
    missing = f"has no {shards[1].name} and {len(shards) - 2} more, which {INDEX} names; download the model again"
    for find in (examine, load_language_model):
        with pytest.raises(ModelError, match=missing):
            find(ModelConfig(path=str(tmp_path)))
    shards[0].unlink()
    assert examine(ModelConfig(path=str(tmp_path))).files.count == len(shards)
