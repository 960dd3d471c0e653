"""Models that the engine does not build are refused with what their config.json says."""

import importlib.util
from dataclasses import replace

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.transformer.moe import moe_utils
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GptOssConfig, MixtralConfig, Qwen2MoeConfig

from hone.models.errors import ModelError
from hone_megatron.families import mixture_layers, model_shape
from hone_megatron.mesh import MegatronRanks
from hone_megatron.patches import patch
from hone_megatron.rows import Rows
from hone_megatron.settings import MegatronParallel, Sizes
from tests.engines.contract.cases import Mesh, save_model, train_models
from tests.ranks import run_ranks

ALONE = MegatronRanks(Sizes(1, 1, 1, 1, 1, 1, False), 0, None, None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GptOssConfig(attention_bias=False), "attention_bias=False in its config.json, .* computes True only"),
        (MixtralConfig(router_jitter_noise=0.1), "router_jitter_noise=0.1 in its config.json"),
        (Qwen2MoeConfig(decoder_sparse_step=2), "decoder_sparse_step=2 in its config.json"),
        (CONFIG_MAPPING["gemma2"](), "is a 'gemma2' model, and the megatron engine builds llama, .*gpt_oss"),
        (CONFIG_MAPPING["nemotron_h"](), "is a 'nemotron_h' model, and the megatron engine builds llama"),
        (CONFIG_MAPPING["deepseek_v32"](), "is a 'deepseek_v32' model, and the megatron engine builds llama"),
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


def test_dense_layers_come_first():
    """A model whose first layers are all dense has no mixture, and no setting of one."""
    config = CONFIG_MAPPING["glm4_moe"](num_hidden_layers=4, first_k_dense_replace=3, n_routed_experts=8)
    assert mixture_layers(config) == 1
    config.first_k_dense_replace = 5
    assert mixture_layers(config) == 0
    assert model_shape(config, "m", ALONE, MegatronParallel(), torch.float32, "cpu").num_moe_experts is None


def test_a_router_needs_no_transformer_engine(monkeypatch):
    """Where that package is missing, on a GPU too. When the patch has become needless, the first call works."""
    monkeypatch.delattr(moe_utils, "te_general_gemm", raising=False)
    states, weight = torch.randn(3, 4, dtype=torch.bfloat16), torch.randn(2, 4, dtype=torch.bfloat16)
    if importlib.util.find_spec("transformer_engine") is None:
        with pytest.raises(NameError, match="te_general_gemm"):
            moe_utils.router_gating_linear(states, weight, None, torch.float32)
    patch()
    found = moe_utils.router_gating_linear(states, weight, None, torch.float32)
    torch.testing.assert_close(found, states.float() @ weight.float().T)


DENSE = {"first_k_dense_replace": 4}


@pytest.mark.ci
@pytest.mark.slow
def test_latent_attention_on_tensor_ranks_without_a_mixture(tmp_path):
    """Such a model may leave `sequence` out; the rotary key's gradient is then a sum over the tensor ranks."""
    cases = [("dense", save_model("deepseek_v3", tmp_path, **DENSE), {})]
    wanted = train_models(Mesh("fsdp2", 1), cases)
    ranks = run_ranks(2, train_models, Mesh("megatron", 2, {"tensor": 2}), cases)
    for (loss, norm), *found in zip(wanted["dense/steps"], *(rank["dense/steps"] for rank in ranks), strict=True):
        assert [one[1] for one in found] == pytest.approx([norm] * 2, rel=1e-5)
        assert sum(one[0] for one in found) == pytest.approx(loss, rel=1e-5, abs=1e-5)
    for key in (key for key in wanted if key.endswith(".weight")):
        torch.testing.assert_close(ranks[0][key], wanted[key], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_masters_in_bfloat16_train_as_those_of_fsdp2(tmp_path):
    settings = {"model": {"dtype": "bfloat16"}, "compute_dtype": "bfloat16"}
    cases = [("narrow", save_model("qwen3", tmp_path), settings)]
    wanted = train_models(Mesh("fsdp2", 1), cases)
    found = run_ranks(1, train_models, Mesh("megatron", 1), cases)[0]
    for (loss, norm), mine in zip(wanted["narrow/steps"], found["narrow/steps"], strict=True):
        assert mine == pytest.approx([loss, norm], rel=0.03, abs=0.03)
    for key in (key for key in wanted if key.endswith(".weight")):
        assert found[key].dtype == wanted[key].dtype == torch.bfloat16
        torch.testing.assert_close(found[key], wanted[key], rtol=0.02, atol=0.02)
