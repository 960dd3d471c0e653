"""Engines around other packages refuse layers that no test compares with `fsdp2`, by the configuration alone."""

import pytest

from hone.engines.rebuilt.configs import require_family
from hone.engines.unsupported import refuse_unproven_layers
from hone.models.errors import ModelError
from hone.models.settings import BuildConfig, ModelConfig
from tests.families.types import tiny_config

STATE, SPARSE = "layers that carry a state from token to token", "sparse attention with an indexer"
SHARED, CHUNKS = "layers that read the keys of earlier ones", "attention in chunks"
REFUSED = {
    **dict.fromkeys(("qwen3_5_text", "qwen3_next", "kimi_linear", "nemotron_h", "lfm2", "granitemoehybrid"), STATE),
    **dict.fromkeys(("falcon_h1", "jamba", "olmo_hybrid", "minimax", "mamba", "mamba2", "zamba2"), STATE),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), SPARSE),
    **dict.fromkeys(("gemma3n_text", "gemma4_text"), SHARED),
    "llama4_text": CHUNKS,
}


@pytest.mark.parametrize("kind", REFUSED)
def test_layers_with_a_state_indexers_and_layers_of_different_kinds_are_refused_by_name(kind, tmp_path):
    tiny_config(kind).save_pretrained(tmp_path)  # there are no weights: they are not read
    with pytest.raises(ModelError) as caught:
        refuse_unproven_layers("automodel", ModelConfig(path=str(tmp_path)))
    said = f"backend automodel does not train {tmp_path}, whose model_type is {kind!r}: it has {REFUSED[kind]}; use"
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize("kind", REFUSED)
def test_engines_with_modules_of_their_own_name_the_types_that_they_build(kind):
    with pytest.raises(ModelError, match=f"m is a '{kind}' model, and the megatron engine builds llama, qwen3; use"):
        require_family(tiny_config(kind), "m", "megatron", ("llama", "qwen3"))


def test_layers_of_different_shapes_are_refused_by_name(tmp_path):
    tiny_config("gemma4_text", {"num_kv_shared_layers": 0}).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="is 'gemma4_text': it has layers of different shapes; use backend fsdp2"):
        refuse_unproven_layers("automodel", ModelConfig(path=str(tmp_path)))


def test_attention_is_not_refused():
    refuse_unproven_layers("automodel", ModelConfig(build=BuildConfig(architecture="deepseek_v3")))
    refuse_unproven_layers("automodel", ModelConfig(build=BuildConfig(architecture="gemma3_text")))
