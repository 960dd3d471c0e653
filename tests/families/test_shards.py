"""Ranks that shard a model hold the weights that one process holds, also where the files have them in several parts."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, Qwen3ForCausalLM

from hone.models.loading import load_language_model
from hone.models.settings import ModelConfig
from hone.models.transformers_patches import reads_shards_alone
from tests.families.checks import make_engine
from tests.families.types import save_tiny
from tests.ranks import run_ranks

JOINED = ("kimi_linear", "olmo_hybrid")  # one convolution here, three in the files
OTHER = ("qwen3_5_moe_text",)  # stacked experts


def weights(folders):
    """Run by each rank."""
    return {f"{name} {key}": one for name in folders for key, one in _whole(folders[name]).items()}


def _whole(folder):
    return dict(make_engine(folder).get_per_tensor_param()[0])


def test_ranks_hold_the_weights_of_one_process(tmp_path):
    folders = {name: str(save_tiny(name, tmp_path / name)) for name in (*JOINED, *OTHER)}
    alone, ranks = weights(folders), run_ranks(2, weights, folders)
    joined = [key for key in alone if key.endswith("conv1d.weight")]
    assert len(joined) >= len(JOINED)
    for rank in ranks:
        assert rank.keys() == alone.keys()
        assert [key for key, one in alone.items() if not torch.equal(rank[key], one)] == []


@pytest.mark.parametrize(("name", "apart"), [("kimi_linear", False), ("olmo_hybrid", False), ("qwen3_moe", True)])
def test_only_models_whose_shards_convert_by_themselves_are_read_in_shards(name, apart, tmp_path):
    config = AutoConfig.from_pretrained(save_tiny(name, tmp_path / name))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for cuts_columns in (False, True):
        assert reads_shards_alone(model, cuts_columns) is apart


def test_transposed_experts_are_read_in_shards_of_whole_experts_only():
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model("qwen3_vl_moe"))
    assert reads_shards_alone(model, cuts_columns=False)
    assert not reads_shards_alone(model, cuts_columns=True)


def test_a_class_of_another_package_is_read_in_shards(tmp_path):
    """Such as VeOmni's: a class of one architecture, not one of transformers' Auto classes."""
    seen = []
    folder = ModelConfig(path=str(save_tiny("qwen3", tmp_path / "model")))
    model = load_language_model(folder, seen.append, class_of=lambda kind: Qwen3ForCausalLM)
    assert isinstance(model, Qwen3ForCausalLM)
    assert len(seen) == 1
