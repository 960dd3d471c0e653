"""Patches on transformers: what they do, and that they are still needed."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel, masking_utils, modeling_utils
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.mixin import DistributedMixin

from hone.models.attention.packed import packed
from hone.models.loading import load_language_model, without_progress_bars
from hone.models.settings import BuildConfig, ModelConfig
from hone.models.transformers_patches import loaded_weights_stay, shard_while_loading
from tests.families.types import save_tiny


@pytest.fixture
def folder(tmp_path):
    build = BuildConfig(hidden_size=16, layers=1, heads=2, mlp_size=16, max_positions=16)
    with without_progress_bars():
        load_language_model(ModelConfig(build=build)).save_pretrained(tmp_path)
    return tmp_path


def test_the_function_is_given_the_empty_model_once(folder):
    seen = []
    loaded = load_language_model(
        ModelConfig(path=str(folder)), lambda model: seen.append({p.device.type for p in model.parameters()})
    )
    assert seen == [{"meta"}]
    assert {p.device.type for p in loaded.parameters()} == {"cpu"}
    assert loaded.config.distributed_config is None


def test_what_the_files_have_is_what_is_loaded(tmp_path):
    """Once transformers leaves the padding token's embedding alone, `loaded_weights_stay` may go in one process."""
    folder = save_tiny("youtu", tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    plain = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert [name for name, one in stored.items() if not torch.equal(plain[name], one)] == ["model.embed_tokens.weight"]
    loaded = load_language_model(ModelConfig(path=str(folder))).state_dict()
    assert [name for name, one in stored.items() if not torch.equal(loaded[name], one)] == []


def patched():
    return (
        DistributedMixin.__dict__["maybe_distribute_model"],
        modeling_utils.convert_and_load_state_dict_in_model,
        PreTrainedModel._initialize_weights,
    )


def test_transformers_is_left_as_it_was():
    before = patched()
    with pytest.raises(ZeroDivisionError), loaded_weights_stay(), shard_while_loading(lambda model: None):
        1 / sum(one is other for one, other in zip(patched(), before, strict=True))  # none is
    assert patched() == before


def test_transformers_meshes_still_have_no_replicas():
    """Once they have, `from_pretrained` may be told our mesh, and the patch can go."""
    assert not [f.name for f in dataclasses.fields(DistributedConfig) if "replicate" in f.name]


def test_packed_rows_are_not_searched_for_the_ends_of_sequences():
    """Once the search finds nothing outside of `packed` either, transformers has dropped it, and the patch can go."""
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    found = masking_utils.find_packed_sequence_indices(positions)
    assert found is not None
    assert found.tolist() == [[0, 0, 0, 1, 1]]
    with packed(torch.tensor([0, 3, 5])):
        assert masking_utils.find_packed_sequence_indices(positions) is None
