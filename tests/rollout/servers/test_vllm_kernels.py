"""Models for which vLLM's build for CPUs has no kernel are refused before a server starts."""

from contextlib import nullcontext

import pytest
import torch
from transformers import AutoModelForCausalLM

from hone.config import ConfigError
from hone.platforms import cpu
from hone.rollout.servers.shape import ServerRanks
from hone.rollout.servers.vllm_kernels import MAMBA_2, check_fits, convolution_channels
from tests.families.types import tiny_config

ATTENTION = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1}  # heads of 32
GRANITE = ATTENTION | {"mamba_expand": 1, "mamba_n_heads": 2, "mamba_d_head": 48, "mamba_n_groups": 1}


@pytest.mark.parametrize(
    ("kind", "dtype", "said"),
    [
        ("kimi_linear", "bfloat16", "no kernel for KDA, and m .model.path. is of type 'kimi_linear'"),
        ("nemotron_h", "bfloat16", "no kernel for experts without gates"),
        ("qwen3_next", "float32", "gated DeltaNet in bfloat16 only, and m .* in float32: set actor.compute_dtype=bfl"),
        ("qwen3_next", "bfloat16", ""),
    ],
)
def test_vllm_on_a_cpu_refuses_layers_that_it_has_no_kernel_for(kind, dtype, said):
    config = tiny_config(kind, {"head_dim": 32} if kind != "kimi_linear" else {})
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        check_fits(ServerRanks(1, 1, 1), config, {"dtype": dtype}, "m")


@pytest.mark.parametrize("kind", MAMBA_2)
def test_channels_are_those_of_the_layers(kind):
    config = tiny_config(kind)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = {one.in_channels for one in model.modules() if isinstance(one, torch.nn.Conv1d)}
    assert found == {convolution_channels(config)}


@pytest.mark.parametrize(
    ("sizes", "dtype", "ranks", "said"),
    [
        ({"mamba_d_state": 8}, "bfloat16", 1, "has 112: set actor.compute_dtype=float32"),
        ({"mamba_d_state": 8}, "float32", 1, ""),
        ({"mamba_d_state": 8, "mamba_d_conv": 3}, "bfloat16", 1, ""),
        ({"mamba_d_state": 8, "layer_types": ["full_attention"] * 4}, "bfloat16", 1, ""),
        ({"mamba_d_state": 16}, "bfloat16", 1, ""),
        ({"mamba_d_state": 16}, "bfloat16", 2, "has 80 on each of 2 ranks"),  # each has the whole group
    ],
)
def test_convolutions_of_mamba_2_have_a_multiple_of_32_channels(sizes, dtype, ranks, said, monkeypatch, tmp_path):
    monkeypatch.setattr(cpu, "CPUINFO", tmp_path / "cpuinfo")
    config = tiny_config("granitemoehybrid", GRANITE | sizes)
    for flags in ("avx512f", "avx512f avx512_bf16"):
        (tmp_path / "cpuinfo").write_text(f"flags : {flags}\n", encoding="utf-8")
        refused = said and flags.endswith("bf16")
        with pytest.raises(ConfigError, match=said) if refused else nullcontext():
            check_fits(ServerRanks(ranks), config, {"dtype": dtype}, "m")
