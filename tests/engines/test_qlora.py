"""An adapter beside layers in 4 bits: all it does is what it does beside plain layers with the values of those bits."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hone.engines.checkpoint.files import ENGINE_FILE, MODEL, CheckpointError, part_file
from hone.models.errors import ModelError
from hone.models.four_bit import FourBitLinear, plain_weights
from hone.models.loading import load_language_model, without_progress_bars
from hone.models.settings import FourBitConfig, ModelConfig
from tests.engines.adapters import by_peft, same, teach, weights

pytest.importorskip("bitsandbytes", reason="comes with hone-rl[qlora]")

NF4 = {"quantise": {}}
KINDS = [
    ("qwen3", NF4, {}),
    ("untied", {"quantise": {"kind": "fp4", "double": False}}, {}),
    ("untied", NF4, {"dora": True}),
    ("qwen3", NF4, {"init": "pissa"}),
    ("qwen3", {"quantise": {"skip": ["o_proj"]}}, {"rslora": True, "targets": ("q_proj", "o_proj")}),
    ("untied", NF4, {"modules_to_save": ("lm_head", "layers.1.mlp")}),
    ("qwen3_moe", NF4, {}),
]
every_kind = pytest.mark.parametrize(
    ("architecture", "quantised", "settings"), KINDS, ids=[f"{name} {q} {' '.join(s)}".strip() for name, q, s in KINDS]
)


@pytest.fixture
def dequantised(tmp_path):
    """dequantised(folder, config) -> a folder with the same model, its weights what the 4 bits stand for."""

    def make(folder, config, dtype="float32"):
        model = ModelConfig(path=str(folder), dtype=dtype)
        narrow, whole = load_language_model(model, four_bit=config), load_language_model(model)
        whole.load_state_dict(dict(plain_weights(narrow, narrow.state_dict().items())))
        with without_progress_bars():
            whole.save_pretrained(tmp_path / f"plain-{dtype}")
        return tmp_path / f"plain-{dtype}"

    return make


def held(quantised, settings):
    """What is in 4 bits: not the modules that are trained whole."""
    config = FourBitConfig(**quantised["quantise"])
    return config.model_copy(update={"skip": (*config.skip, *settings.get("modules_to_save", ()))})


def gradients(engine, batch, loss):
    engine.forward_backward(batch, loss)
    found = {name: master.grad.clone() for name, master in engine.weights.masters.items()}
    engine.weights.clear_gradients()
    return found


@pytest.mark.slow
@every_kind
def test_it_learns_as_beside_plain_layers_of_the_same_values(
    architecture, quantised, settings, saved, dequantised, engine_of, plain, make_batch, losses, tmp_path
):
    folder, batch = saved(architecture), make_batch(seed=8)
    equal = dequantised(folder, held(quantised, settings))
    engine, other = engine_of(folder, **quantised, **settings), engine_of(equal, **settings)
    assert any(isinstance(one, FourBitLinear) for one in engine.model.modules())
    mine, theirs = gradients(engine, batch, losses.policy), gradients(other, batch, losses.policy)
    assert mine.keys() == theirs.keys()
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=0, atol=1e-6, msg=name)
    steps = [teach(one, make_batch, losses.likelihood) for one in (engine, other)]
    assert steps[0] == pytest.approx(steps[1], abs=1e-6)
    assert steps[0][0] != pytest.approx(steps[0][-1], abs=1e-3)
    expected = engine.infer_batch(batch).logprobs
    torch.testing.assert_close(other.infer_batch(batch).logprobs, expected, rtol=0, atol=1e-6)
    one, two = weights(engine), weights(other)
    assert one.keys() == two.keys()
    for name, weight in one.items():
        torch.testing.assert_close(weight, two[name], rtol=0, atol=1e-6, msg=name)

    base = plain(equal)  # without the adapter: what is sent to a rollout, and what the policy is measured against
    with engine.disable_adapter():
        assert same(weights(engine), weights(base))
        torch.testing.assert_close(
            engine.infer_batch(batch).logprobs, base.infer_batch(batch).logprobs, rtol=0, atol=1e-6
        )
    engine.export_hf(tmp_path / "merged")
    torch.testing.assert_close(plain(tmp_path / "merged").infer_batch(batch).logprobs, expected, rtol=0, atol=1e-5)
    with without_progress_bars():
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert same({name: loaded.state_dict()[name] for name in one}, weights(engine))
    assert not any("quant" in key for key in json.loads((tmp_path / "merged/config.json").read_text()))
    engine.export_adapter(tmp_path / "adapter")
    found, _ = by_peft(equal, tmp_path / "adapter", batch)
    torch.testing.assert_close(found, expected[batch.loss_mask], rtol=0, atol=1e-5)
    again = engine_of(folder, path=str(tmp_path / "adapter"), **quantised)
    torch.testing.assert_close(again.infer_batch(batch).logprobs, expected, rtol=0, atol=2e-6)


def test_the_original_weights_are_other_ones(saved, engine_of, plain, make_batch):
    folder, batch = saved("qwen3"), make_batch()
    gap = engine_of(folder, **NF4).infer_batch(batch).logprobs - plain(folder).infer_batch(batch).logprobs
    assert gap.abs().max() > 1e-3


def test_in_bfloat16_too(saved, dequantised, engine_of, make_batch, losses):
    folder, batch, narrow = saved("untied"), make_batch(seed=8), {"compute_dtype": "bfloat16"}
    equal = dequantised(folder, FourBitConfig(), "bfloat16")
    engine, other = engine_of(folder, narrow, **NF4), engine_of(equal, narrow)
    for one in (engine, other):
        teach(one, make_batch, losses.likelihood)
    torch.testing.assert_close(engine.infer_batch(batch).logprobs, other.infer_batch(batch).logprobs, rtol=0, atol=1e-6)
    with engine.disable_adapter():
        mine = weights(engine)
    assert {str(one.dtype) for one in mine.values()} == {"torch.bfloat16"}
    assert weights(engine)["model.layers.0.mlp.up_proj.weight"].dtype == torch.float32


def test_a_value_model_trains_its_head_beside_it(saved, engine_of, plain, make_batch, losses, tmp_path):
    folder, batch = saved("qwen3"), make_batch(seed=8)
    engine = engine_of(folder, model_type="value_model", modules_to_save=("score", "norm"), **NF4)
    teach(engine, make_batch, losses.values)
    expected = engine.infer_batch(batch).values
    assert expected.abs().max() > 0
    engine.export_hf(tmp_path / "merged")
    whole = plain(tmp_path / "merged", model_type="value_model")
    torch.testing.assert_close(whole.infer_batch(batch).values, expected, rtol=0, atol=1e-5)


def test_a_checkpoint_holds_the_adapter_alone_and_training_goes_on_to_the_bit(
    saved, engine_of, make_batch, losses, tmp_path
):
    folder = saved("qwen3")
    through = engine_of(folder, **NF4, dropout=0.2)
    teach(through, make_batch, losses.likelihood)
    through.save_checkpoint(tmp_path)
    assert all(".lora_" in name for name in load_file(tmp_path / part_file(MODEL, 0, 1)))
    facts = json.loads((tmp_path / ENGINE_FILE).read_text())["adapter"]
    assert facts["quantise"] == {"kind": "nf4", "double": True, "skip": []}
    resumed = engine_of(folder, **NF4, dropout=0.2)
    resumed.load_checkpoint(tmp_path)
    for seed in (3, 4):
        one, other = (engine.train_batch(make_batch(seed=seed), losses.likelihood) for engine in (through, resumed))
        assert {n: m.value for n, m in one.items()} == {n: m.value for n, m in other.items()}
    assert same(weights(through), weights(resumed))
    for lora in ({}, {"quantise": {"kind": "fp4"}}):
        with pytest.raises(CheckpointError, match=r"written with an adapter .*'nf4'.*this run has an adapter"):
            engine_of(folder, dropout=0.2, **lora).load_checkpoint(tmp_path)


def test_there_is_no_plain_copy_of_what_is_held_in_four_bits(saved, engine_of, make_batch, losses):
    engine = engine_of(saved("untied"), **NF4)
    teach(engine, make_batch, losses.likelihood, 1)
    layers = [one for one in engine.model.modules() if isinstance(one, FourBitLinear)]
    assert len(layers) == 14
    for layer in layers:
        assert "weight" not in layer._parameters
        assert {str(one.dtype) for one in layer._buffers.values()} == {"torch.uint8", "torch.float32"}
        assert layer.bytes() < layer.in_features * layer.out_features * 0.54 + 1100
    frozen = [name for name, one in engine.model.named_parameters() if not one.requires_grad]
    assert not any("proj" in name for name in frozen)
    assert all(".default." in name for name in engine.weights.masters)


def test_a_model_in_four_bits_already_is_refused(saved, engine_of):
    folder = saved("qwen3")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"is quantised \(fp8\) already"):
        engine_of(folder, **NF4)
