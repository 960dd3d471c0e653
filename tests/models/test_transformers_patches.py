"""Patches on transformers: what they do, and that they are still needed."""

import dataclasses

import pytest
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.mixin import DistributedMixin

from hone.models.loading import load_language_model, without_progress_bars
from hone.models.settings import BuildConfig, ModelConfig
from hone.models.transformers_patches import shard_while_loading


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


def test_transformers_is_left_as_it_was():
    before = DistributedMixin.__dict__["maybe_distribute_model"]
    with pytest.raises(ZeroDivisionError), shard_while_loading(lambda model: None):
        raise ZeroDivisionError
    assert DistributedMixin.__dict__["maybe_distribute_model"] is before


def test_transformers_meshes_still_have_no_replicas():
    """Once they have, `from_pretrained` may be told our mesh, and the patch can go."""
    assert not [f.name for f in dataclasses.fields(DistributedConfig) if "replicate" in f.name]
