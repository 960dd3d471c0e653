"""Layers with a state in bfloat16: what transformers keeps in float32 stays so; what is sent is computed with."""

import pytest
import torch
from safetensors.torch import load_file

from hone.models.loading import load_language_model
from hone.models.settings import ModelConfig
from hone.models.vision.model import auto_class
from tests.families.checks import likelihood, make_batch, make_engine
from tests.families.types import save_tiny


@pytest.mark.parametrize("kind", ["nemotron_h", "qwen3_5_text", "kimi_linear", "minimax", "lfm2_moe"])
def test_what_transformers_keeps_in_float32_is_kept(kind, tmp_path):
    folder = save_tiny(kind, tmp_path / "model")
    plain = auto_class(kind).from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    held = load_language_model(ModelConfig(path=str(folder), dtype="bfloat16")).state_dict()
    assert held.keys() == plain.keys()
    narrow = {name for name, weight in held.items() if weight.dtype == torch.bfloat16}
    assert not {name for name in narrow if plain[name].dtype == torch.float32}
    assert any(name.endswith("A_log") for name in narrow) == (kind not in ("minimax", "lfm2_moe"))


@pytest.mark.parametrize("kind", ["nemotron_h", "qwen3_5_text"])
def test_states_are_sent_as_the_trainer_computes_with_them_and_kept_in_float32(kind, tmp_path):
    folder = save_tiny(kind, tmp_path / "model")
    engine = make_engine(folder, compute_dtype="bfloat16")
    before = {name: weight.clone() for name, weight in engine.get_per_tensor_param()[0]}
    engine.train_batch(make_batch(0), likelihood)
    kept, sent = dict(engine.get_per_tensor_param()[0]), dict(engine.get_per_tensor_param(dtype=torch.bfloat16)[0])
    engine.export_hf(tmp_path / "export")
    files = load_file(tmp_path / "export" / "model.safetensors")
    exported = {name.partition("layers.")[2]: weight for name, weight in files.items()}  # Nemotron-H's have a prefix
    computed = dict(engine.model.named_parameters())
    states = [name for name in kept if name.endswith((".A_log", ".dt_bias"))]
    assert states
    for name in states:
        assert kept[name].dtype == torch.float32
        assert not torch.equal(kept[name], before[name])
        stored = exported[name.partition("layers.")[2]]
        assert sent[name].dtype == stored.dtype == computed[name].dtype == torch.bfloat16
        assert torch.equal(sent[name], computed[name].detach())
        assert torch.equal(sent[name], stored)
