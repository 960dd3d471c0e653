"""Models that the engine does not build are refused with what their config.json says."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("megatron.core")

from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GptOssConfig, MixtralConfig, Qwen2MoeConfig

from hone.engines.megatron.families import mixture_layers, model_shape
from hone.engines.megatron.mesh import MegatronRanks
from hone.engines.megatron.rows import Rows
from hone.engines.megatron.settings import MegatronParallel, Sizes
from hone.models.errors import ModelError

ALONE = MegatronRanks(Sizes(1, 1, 1, 1, 1, 1, False), 0, None, None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GptOssConfig(attention_bias=False), "attention_bias=False in its config.json, .* computes True only"),
        (MixtralConfig(router_jitter_noise=0.1), "router_jitter_noise=0.1 in its config.json"),
        (Qwen2MoeConfig(decoder_sparse_step=2), "decoder_sparse_step=2 in its config.json"),
        (CONFIG_MAPPING["gemma2"](), "is a 'gemma2' model, and the megatron engine builds llama, .*gpt_oss"),
    ],
)
def test_what_the_engine_computes_otherwise_is_refused(config, message):
    with pytest.raises(ModelError, match=message):
        model_shape(config, "m", ALONE, MegatronParallel(), torch.float32, "cpu")


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"expert": 3}, r"expert = 3 does not divide the 4 experts of m"),
        ({"expert_tensor": 5}, r"expert_tensor = 5 does not divide the 24 features of each expert of m"),
        ({"tensor": 2}, r"tensor = 2: a mixture of experts \(m\) needs .*sequence = true"),
    ],
)
def test_a_mixture_that_the_mesh_cannot_cut_is_refused(parallel, message):
    config = Qwen2MoeConfig(
        num_experts=4, moe_intermediate_size=24, num_attention_heads=4, num_key_value_heads=4, qkv_bias=False
    )
    sizes = Sizes(1, parallel.get("tensor", 1), 1, 1, parallel.get("expert", 1), 1, False)
    ranks = MegatronRanks(replace(sizes, expert_tensor=parallel.get("expert_tensor", 1)), 0, None, None)
    with pytest.raises(ModelError, match=message):
        model_shape(config, "m", ranks, MegatronParallel(**parallel), torch.float32, "cpu")


def test_a_scaled_rotary_part_of_a_head_is_refused():
    """The scale is a factor of whole scores in the engine; here it would concern half of each head."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    config = CONFIG_MAPPING["glm4_moe"](
        num_hidden_layers=1, num_attention_heads=64, rope_parameters={**rope, "partial_rotary_factor": 0.5}
    )
    with torch.device("meta"):
        body = AutoModelForCausalLM.from_config(config).model
    with pytest.raises(ModelError, match=r"m scales the rotary part of its heads alone \(type 'yarn'\)"):
        Rows(body, ALONE, "m", "cpu")


@pytest.mark.filterwarnings("ignore:full scope is deprecated")  # megatron-core, of its own default
def test_dense_layers_come_first():
    """A model whose first layers are all dense has no mixture, and no setting of one."""
    config = CONFIG_MAPPING["glm4_moe"](num_hidden_layers=4, first_k_dense_replace=3, n_routed_experts=8)
    assert mixture_layers(config) == 1
    config.first_k_dense_replace = 5
    assert mixture_layers(config) == 0
    assert model_shape(config, "m", ALONE, MegatronParallel(), torch.float32, "cpu").num_moe_experts is None
