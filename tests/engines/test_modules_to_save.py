"""Modules that are trained whole beside an adapter: what learns, what stays, and what the files mean to PEFT."""

import json
from contextlib import nullcontext

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hone.engines.checkpoint.files import MODEL, CheckpointError, part_file
from hone.engines.lora.adapter_files import CONFIG_FILE, WEIGHTS_FILE, AdapterError
from hone.engines.lora.whole_modules import file_names
from hone.models.loading import load_language_model
from hone.models.settings import BuildConfig, ModelConfig
from hone.types import LossOutput
from tests.engines.adapters import by_peft, same, teach, weights

KINDS = [
    ("untied", ("lm_head",)),
    ("qwen3", ("lm_head",)),
    ("qwen3", ("embed_tokens",)),
    ("untied", ("embed_tokens", "norm")),
    ("untied", ("layers.0.mlp", "lm_head")),
    ("qwen3_moe", ("norm", "lm_head")),
]
every_kind = pytest.mark.parametrize(
    ("architecture", "names"), KINDS, ids=[f"{name} {' '.join(names)}" for name, names in KINDS]
)
TIED = {"model.embed_tokens.weight", "lm_head.weight"}
WHOLE = {
    ("untied", ("lm_head",)): {"lm_head.weight"},
    ("qwen3", ("lm_head",)): TIED,
    ("qwen3", ("embed_tokens",)): TIED,
    ("untied", ("embed_tokens", "norm")): {"model.embed_tokens.weight", "model.norm.weight"},
    ("untied", ("layers.0.mlp", "lm_head")): {
        "lm_head.weight",
        *(f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    },
    ("qwen3_moe", ("norm", "lm_head")): {"model.norm.weight", *TIED},
}


@every_kind
def test_they_learn_the_base_stays_and_every_form_of_export_says_the_same(
    architecture, names, saved, engine_of, plain, make_batch, losses, tmp_path
):
    folder, batch = saved(architecture), make_batch(seed=8)
    engine, base = engine_of(folder, modules_to_save=names), plain(folder)
    whole = WHOLE[architecture, names]
    torch.testing.assert_close(engine.infer_batch(batch).logprobs, base.infer_batch(batch).logprobs, rtol=0, atol=2e-6)
    assert same(weights(engine), weights(base))
    steps = teach(engine, make_batch, losses.likelihood)
    assert all(step > 0 for step in steps)
    expected, learnt, before = engine.infer_batch(batch).logprobs, weights(engine), weights(base)
    assert learnt.keys() == before.keys()
    assert all((learnt[name] - before[name]).abs().max() > 1e-3 for name in whole)
    adapted = {name for name in before if "_proj" in name and ".experts." not in name}
    assert {name for name in before if not torch.equal(learnt[name], before[name])} == whole | adapted
    with engine.disable_adapter():
        assert torch.equal(engine.infer_batch(batch).logprobs, base.infer_batch(batch).logprobs)
        assert same(weights(engine), before)
        with engine.disable_adapter():
            pass
        assert torch.equal(engine.infer_batch(batch).logprobs, base.infer_batch(batch).logprobs), "still without it"
    assert torch.equal(engine.infer_batch(batch).logprobs, expected)

    engine.export_hf(tmp_path / "merged")
    torch.testing.assert_close(plain(tmp_path / "merged").infer_batch(batch).logprobs, expected, rtol=0, atol=1e-5)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in learnt.items())

    engine.export_adapter(tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / WEIGHTS_FILE)
    assert {name.removeprefix("base_model.model.") for name in tensors if ".lora_" not in name} == whole
    with pytest.warns(UserWarning, match="tie_word_embeddings") if whole >= TIED else nullcontext():
        found, _ = by_peft(folder, tmp_path / "adapter", batch)
    torch.testing.assert_close(found, expected[batch.loss_mask], rtol=0, atol=1e-5)
    again = engine_of(folder, path=str(tmp_path / "adapter"))
    torch.testing.assert_close(again.infer_batch(batch).logprobs, expected, rtol=0, atol=2e-6)
    again.export_adapter(tmp_path / "again")
    assert same(load_file(tmp_path / "again" / WEIGHTS_FILE), tensors)


def test_an_adapter_that_peft_made_is_gone_on_with(saved, engine_of, make_batch, tmp_path):
    folder, batch = saved("untied"), make_batch(seed=8)
    made = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder),
        peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False),
    )
    with torch.no_grad():
        made.base_model.model.lm_head.modules_to_save["default"].weight.mul_(1.5)
    made.save_pretrained(tmp_path / "adapter")
    found, _ = by_peft(folder, tmp_path / "adapter", batch)
    engine = engine_of(folder, path=str(tmp_path / "adapter"))
    torch.testing.assert_close(engine.infer_batch(batch).logprobs[batch.loss_mask], found, rtol=0, atol=1e-5)


def test_masters_are_wide_and_the_frozen_ones_narrow(saved, engine_of, make_batch, losses, tmp_path):
    engine = engine_of(saved("untied"), {"compute_dtype": "bfloat16"}, modules_to_save=("lm_head",))
    teach(engine, make_batch, losses.likelihood)
    held = {name: str(tensor.dtype) for name, tensor, _ in engine.weights.parts()}
    assert held["lm_head.trained.default.weight"] == "torch.float32"
    assert held["lm_head.base_layer.weight"] == "torch.bfloat16"
    assert {str(one.dtype) for one in engine.model.parameters()} == {"torch.bfloat16"}
    assert weights(engine)["lm_head.weight"].dtype == torch.float32
    engine.export_hf(tmp_path)
    assert load_file(tmp_path / "model.safetensors")["lm_head.weight"].dtype == torch.bfloat16


def test_training_goes_on_to_the_bit_from_a_checkpoint(saved, engine_of, make_batch, losses, tmp_path):
    folder = saved("qwen3")
    through = engine_of(folder, modules_to_save=("lm_head", "norm"))
    teach(through, make_batch, losses.likelihood)
    through.save_checkpoint(tmp_path)
    stored = {name for name in load_file(tmp_path / part_file(MODEL, 0, 1)) if ".lora_" not in name}
    assert stored == {"model.embed_tokens.trained.default.weight", "model.norm.trained.default.weight"}
    resumed = engine_of(folder, modules_to_save=("lm_head", "norm"))
    resumed.load_checkpoint(tmp_path)
    for engine in (through, resumed):
        teach(engine, make_batch, losses.likelihood)
    assert same(weights(through), weights(resumed))
    with pytest.raises(CheckpointError, match=r"written with an adapter .*modules_to_save.*this run has an adapter"):
        engine_of(folder).load_checkpoint(tmp_path)


def test_the_exact_kl_is_to_the_head_as_it_was(saved, engine_of, plain, make_batch, losses):
    folder, batch = saved("untied"), make_batch(seed=8)
    engine = engine_of(folder, reference=ModelConfig(path=str(folder)), modules_to_save=("lm_head",))
    second = plain(folder, reference=ModelConfig(path=str(folder)))
    teach(engine, make_batch, losses.likelihood)
    with engine.disable_adapter():
        states = engine.infer_batch(batch, frozenset({"states"})).extras["states"]
        none = engine.infer_batch(batch.with_(reference_states=states), frozenset({"full_kl"})).extras["full_kl"]
    torch.testing.assert_close(none, torch.zeros_like(none), rtol=0, atol=1e-6)
    kl = engine.infer_batch(batch.with_(reference_states=states), frozenset({"full_kl"}))
    policy = engine.infer_batch(batch, frozenset({"states"})).extras["states"]
    head, base = weights(engine)["lm_head.weight"], weights(second)["lm_head.weight"]
    p, q = (torch.log_softmax(h @ w.T / 0.9, -1) for h, w in ((policy, head), (states, base)))
    expected = (p.exp() * (p - q)).sum(-1)[batch.loss_mask]
    torch.testing.assert_close(kl.extras["full_kl"][batch.loss_mask], expected, rtol=0, atol=1e-5)
    assert expected.max() > 1e-3


def test_a_value_models_head_is_trained_anyway(saved, engine_of, make_batch, losses):
    engine = engine_of(saved("qwen3"), model_type="value_model", modules_to_save=("score", "norm"))
    teach(engine, make_batch, losses.values)
    assert "score.weight" in engine.weights.masters
    assert "body.norm.trained.default.weight" in engine.weights.masters
    names = {name for name in dict(engine.get_per_tensor_param(adapter_only=True)[0]) if ".lora_" not in name}
    assert names == {"base_model.model.norm.weight"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"modules_to_save": ("lm_hed",)},
            r"lora\.modules_to_save: unknown module of .*'lm_hed'; did you mean 'lm_head'\?",
        ),
        ({"modules_to_save": ("score",)}, "unknown module of .*'score'"),
        ({"modules_to_save": ("mlp",), "targets": ("up_proj",)}, "nothing of .* is left to adapt"),
    ],
)
def test_what_does_not_fit_is_refused(settings, message, saved, engine_of):
    with pytest.raises(AdapterError, match=message):
        engine_of(saved("untied"), **settings)


def test_files_that_do_not_fit_are_refused(saved, engine_of, tmp_path):
    folder, adapter = saved("untied"), tmp_path / "adapter"
    engine_of(folder, modules_to_save=("lm_head",)).export_adapter(adapter)
    with pytest.raises(AdapterError, match=r"lora\.modules_to_save: the adapter in lora\.path decides"):
        engine_of(folder, path=str(adapter), modules_to_save=("norm",))
    config = json.loads((adapter / CONFIG_FILE).read_text())
    (adapter / CONFIG_FILE).write_text(json.dumps({**config, "modules_to_save": None}))
    with pytest.raises(AdapterError, match=r"holds lm_head\.weight, which is no part of a LoRA adapter"):
        engine_of(folder, path=str(adapter))
    (adapter / CONFIG_FILE).write_text(json.dumps({**config, "modules_to_save": ["lm_head", "model.norm"]}))
    with pytest.raises(AdapterError, match=r"should have model\.norm\.weight as \[32\], and does not have it"):
        engine_of(folder, path=str(adapter))


def test_peft_finds_just_these_modules_by_their_names():
    model = load_language_model(ModelConfig(build=BuildConfig(hidden_size=32, layers=2, heads=4, mlp_size=48)))
    assert file_names(model, ["lm_head", "model.norm"]) == ["lm_head", "model.norm"]
    assert file_names(model, ["model.layers.0.mlp", "model.layers.1.mlp"]) == ["mlp"]
    assert file_names(model, ["model.layers.0.mlp"]) == ["model.layers.0.mlp"]


def test_tied_weights_stay_one(saved, engine_of, make_batch):
    engine = engine_of(saved("qwen3"), modules_to_save=("lm_head",))

    def loss(output, batch):
        return LossOutput(-output.logprobs)

    engine.train_batch(make_batch(), loss)
    head, embedding = engine.model.lm_head.weight, engine.model.model.embed_tokens.weight
    assert head is embedding
    assert head is not engine.model.lm_head.base_layer.weight
    assert sum(".trained." in name for name in engine.weights.masters) == 1


def test_what_no_adapter_can_hold_is_refused(saved, engine_of):
    folder = saved("deepseek")
    with pytest.raises(AdapterError, match=r"layers\.1\.mlp\.gate keeps e_score_correction_bias, which is no weight"):
        engine_of(folder, modules_to_save=("gate",))


def test_the_exact_kl_to_a_head_that_an_adapter_brought_is_refused(saved, engine_of, tmp_path):
    """It is trained on, and the base has another."""
    folder = saved("untied")
    engine_of(folder, modules_to_save=("lm_head",)).export_adapter(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"kind: full needs the head .* and the one that lora.path="):
        engine_of(folder, path=str(tmp_path / "adapter"), reference=ModelConfig(path=str(folder)))
