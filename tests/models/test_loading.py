"""Loading and building models: every weight accounted for, and one clear sentence for what cannot be used."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hone.config import ConfigError, build
from hone.models.attention.packed import PACKED
from hone.models.building import build_config
from hone.models.errors import ModelError
from hone.models.loading import load_language_model, load_value_model, without_progress_bars
from hone.models.settings import BuildConfig, ModelConfig

TINY = {"hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "mlp_size": 48, "max_positions": 64}


@pytest.fixture
def folder(tmp_path):
    model = load_language_model(ModelConfig(build=BuildConfig(**TINY)))
    with without_progress_bars():
        model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_saved_model_loads_to_the_same_weights(folder):
    built = load_language_model(ModelConfig(build=BuildConfig(**TINY)))
    loaded = load_language_model(ModelConfig(path=str(folder)))
    assert loaded.config._attn_implementation == PACKED
    for (name, one), (_, other) in zip(built.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    narrow = load_language_model(ModelConfig(path=str(folder), dtype="bfloat16"))
    assert {p.dtype for p in narrow.parameters()} == {torch.bfloat16}


def test_building_depends_on_the_seed_and_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one, same, other = (load_language_model(ModelConfig(build=BuildConfig(**TINY, seed=s))) for s in (0, 0, 1))
    assert torch.rand(1) == expected
    weights = [model.get_input_embeddings().weight for model in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "qwen3_moe", "mistral", "gemma3_text", "olmo2"])
def test_sizes_reach_the_architecture(architecture):
    config = build_config(BuildConfig(**TINY | {"architecture": architecture, "tie_embeddings": False}))
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (32, 2, 4)
    assert (config.num_key_value_heads, config.intermediate_size, config.max_position_embeddings) == (2, 48, 64)
    assert (config.vocab_size, config.tie_word_embeddings) == (8 + 96, False)
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)


def test_options_reach_the_architecture_and_unknown_ones_are_refused():
    moe = TINY | {"architecture": "qwen3_moe"}
    assert build_config(BuildConfig(**moe, options={"num_experts": 4})).num_experts == 4
    with pytest.raises(ModelError, match="did you mean 'num_experts'"):
        build_config(BuildConfig(**moe, options={"num_expert": 4}))
    with pytest.raises(ModelError, match="unknown architecture 'quen3'; did you mean 'qwen3'"):
        build_config(BuildConfig(**TINY | {"architecture": "quen3"}))
    written_out = BuildConfig(architecture="gpt2", kv_heads=None, head_size=None)  # as a dump of its settings says
    assert build_config(written_out).n_head == 4
    with pytest.raises(ModelError, match="kv_heads=2 does not exist in architecture 'gpt2'"):
        build_config(BuildConfig(**TINY | {"architecture": "gpt2"}))


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match="exactly one of path and build should be set, found neither"):
        build(ModelConfig, {}, "run.yaml", "model")
    with pytest.raises(ConfigError, match="found both"):
        build(ModelConfig, {"path": "x", "build": {}}, "run.yaml", "model")
    with pytest.raises(ConfigError, match="heads=4 should be a multiple of kv_heads=3"):
        build(BuildConfig, {"heads": 4, "kv_heads": 3}, "run.yaml", "model.build")
    with pytest.raises(ConfigError, match="hidden_size=30 should be a multiple of heads=4"):
        build(BuildConfig, {"heads": 4, "hidden_size": 30}, "run.yaml", "model.build")


def test_a_missing_folder_or_file_is_named(folder, tmp_path):
    with pytest.raises(ModelError, match=r"no folder .*/no/where \(nor .*/no\)"):
        load_language_model(ModelConfig(path=str(tmp_path / "no" / "where")))
    with pytest.raises(ModelError, match="has the models model"):
        load_language_model(ModelConfig(path=str(tmp_path / "modle")))
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_language_model(ModelConfig(path=str(tmp_path)))
    with pytest.raises(ModelError, match="is a file"):
        load_language_model(ModelConfig(path=str(folder / "config.json")))
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        load_language_model(ModelConfig(path=str(folder)))


def test_code_that_comes_with_a_model_is_not_run(folder):
    edit(folder, auto_map={"AutoModelForCausalLM": "modeling.Model"})
    (folder / "modeling.py").write_text("raise SystemExit('foreign code ran')")
    with pytest.raises(ModelError, match="comes with Python code"):
        load_language_model(ModelConfig(path=str(folder)))


def test_quantised_and_unknown_checkpoints_are_refused(folder):
    edit(folder, quantization_config={"quant_method": "gptq"})
    with pytest.raises(ModelError, match="quantised \\(gptq\\)"):
        load_language_model(ModelConfig(path=str(folder)))
    edit(folder, quantization_config=None, model_type="qwen33")
    with pytest.raises(ModelError, match="'qwen33'; did you mean 'qwen3'\\?"):
        load_language_model(ModelConfig(path=str(folder)))


def test_missing_and_truncated_weights_are_errors(folder):
    path = folder / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_language_model(ModelConfig(path=str(folder)))
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_language_model(ModelConfig(path=str(folder)))


def test_a_value_model_starts_at_zero_and_survives_saving(folder, tmp_path):
    model = load_value_model(ModelConfig(path=str(folder)))
    assert torch.equal(model.values(torch.randn(3, 32)), torch.zeros(3))
    torch.nn.init.normal_(model.score.weight)
    with without_progress_bars():
        model.save_pretrained(tmp_path / "critic")
    again = load_value_model(ModelConfig(path=str(tmp_path / "critic")))
    assert torch.equal(again.score.weight, model.score.weight)
    for one, other in zip(again.body.parameters(), model.body.parameters(), strict=True):
        assert torch.equal(one, other)
