"""The exact KL needs the reference's output layer beside the policy, and no other weight of it."""

import pytest
import torch

from hone.engines.logprobs import Head
from hone.engines.reference_head import head_of_reference
from hone.models.loading import load_head, load_language_model
from hone.models.settings import ModelConfig
from tests.families.families import FAMILIES, save


@pytest.mark.parametrize("family", ["Qwen3", "Qwen2", "Gemma 2", "Phi-4-mini", "DeepSeek-V3", "gpt-oss"])
def test_it_is_read_without_the_rest(family, tmp_path):
    model = ModelConfig(path=str(save(FAMILIES[family], tmp_path / "model")))
    whole, alone = Head.of(load_language_model(model)), load_head(model)
    real = {id(one): one.numel() for one in alone.parameters() if not one.is_meta}
    assert sum(real.values()) == whole.weight.numel()
    head = head_of_reference(model, "float32", "cpu")()
    assert torch.equal(head.weight, whole.weight)
    assert (head.scale, head.softcap, head.bias) == (whole.scale, whole.softcap, whole.bias)
