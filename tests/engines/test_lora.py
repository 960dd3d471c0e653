"""An adapter in one process: what it leaves alone, what it adds, and what its files mean to PEFT."""

import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from hone.engines.checkpoint.files import ENGINE_FILE, MODEL, CheckpointError, part_file
from hone.engines.lora.adapter_files import CONFIG_FILE, WEIGHTS_FILE, AdapterError
from hone.models.loading import without_progress_bars
from hone.models.settings import ModelConfig
from hone.types import LossOutput
from tests.engines.adapters import by_peft, same, teach, weights

EXPERTS = {"targets": ("q_proj", "experts.gate_up_proj", "experts.down_proj")}
KINDS = {
    "plain": ("qwen3", {}),
    "untied dora": ("untied", {"dora": True}),
    "pissa": ("qwen3", {"init": "pissa"}),
    "experts": ("qwen3_moe", EXPERTS),
    "gpt2": ("gpt2", {}),
}
MORE_KINDS = {
    "dora rslora": ("qwen3", {"dora": True, "rslora": True, "targets": ("q_proj", "v_proj")}),
    "gaussian": ("qwen3", {"init": "gaussian", "exclude": ("o_proj",)}),
    "orthogonal": ("qwen3", {"init": "orthogonal"}),
    "pissa rslora": ("qwen3", {"init": "pissa", "rslora": True}),
    "olora": ("qwen3", {"init": "olora"}),
    "gpt2 pissa": ("gpt2", {"init": "pissa"}),
    "gpt2 dora": ("gpt2", {"dora": True}),
}
every_kind = pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        *(pytest.param(*kind, id=name) for name, kind in KINDS.items()),
        *(pytest.param(*kind, id=name, marks=pytest.mark.slow) for name, kind in MORE_KINDS.items()),
    ],
)


# -------------------------------------------------------------------------------------- what it leaves and what it adds


@every_kind
def test_before_training_the_adapter_adds_nothing(architecture, settings, saved, engine_of, plain, make_batch):
    folder, batch = saved(architecture), make_batch()
    engine, base = engine_of(folder, **settings), plain(folder)
    expected = base.infer_batch(batch).logprobs
    torch.testing.assert_close(engine.infer_batch(batch).logprobs, expected, rtol=0, atol=2e-6)
    mine, theirs = weights(engine), weights(base)
    assert mine.keys() == theirs.keys()
    for name, weight in mine.items():
        torch.testing.assert_close(weight, theirs[name], rtol=0, atol=1e-6, msg=name)


@every_kind
def test_the_base_is_never_changed_and_is_there_without_the_adapter(
    architecture, settings, saved, engine_of, plain, make_batch, losses
):
    folder, batch = saved(architecture), make_batch(seed=8)
    engine, base = engine_of(folder, **settings), plain(folder)
    before = engine.infer_batch(batch).logprobs
    steps = teach(engine, make_batch, losses.likelihood)
    after = engine.infer_batch(batch).logprobs
    assert (after - before).abs().max() > 1e-3
    assert all(step > 0 for step in steps)
    with engine.disable_adapter():
        assert torch.equal(engine.infer_batch(batch).logprobs, base.infer_batch(batch).logprobs)
        assert same(weights(engine), weights(base))
    assert torch.equal(engine.infer_batch(batch).logprobs, after)
    with engine.disable_adapter():  # and it learns on as before
        pass
    assert teach(engine, make_batch, losses.likelihood, 1)[0] < steps[0]


@every_kind
def test_merged_weights_compute_what_base_and_adapter_compute(
    architecture, settings, saved, engine_of, plain, make_batch, losses, tmp_path
):
    engine, batch = engine_of(saved(architecture), **settings), make_batch(seed=8)
    teach(engine, make_batch, losses.likelihood)
    expected = engine.infer_batch(batch).logprobs
    engine.export_hf(tmp_path / "merged")
    whole = plain(tmp_path / "merged")
    torch.testing.assert_close(whole.infer_batch(batch).logprobs, expected, rtol=0, atol=1e-5)
    assert same(weights(engine), weights(engine))  # to the bit, each time it is asked
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert same({name: loaded[name] for name in weights(engine)}, weights(engine))


@every_kind
def test_peft_loads_the_exported_adapter(architecture, settings, saved, engine_of, make_batch, losses, tmp_path):
    base, batch = saved(architecture), make_batch(seed=8)
    engine = engine_of(base, **settings)
    teach(engine, make_batch, losses.likelihood)
    engine.export_adapter(tmp_path / "adapter")
    logprobs, model = by_peft(base, tmp_path / "adapter", batch)
    torch.testing.assert_close(logprobs, engine.infer_batch(batch).logprobs[batch.loss_mask], rtol=0, atol=1e-5)
    model.save_pretrained(tmp_path / "again")
    assert same(load_file(tmp_path / "again" / WEIGHTS_FILE), load_file(tmp_path / "adapter" / WEIGHTS_FILE))
    assert json.loads((tmp_path / "adapter" / CONFIG_FILE).read_text())["base_model_name_or_path"] == str(base)
    stream, config = engine.get_per_tensor_param(adapter_only=True)
    assert same(dict(stream), load_file(tmp_path / "adapter" / WEIGHTS_FILE))
    assert config == json.loads((tmp_path / "adapter" / CONFIG_FILE).read_text()) == engine.adapter_config()


@pytest.mark.parametrize(
    ("settings", "scale"),
    [({}, 8 / 4), ({"rslora": True}, 8 / 2), ({"dora": True}, 8 / 4), ({"dora": True, "rslora": True}, 8 / 2)],
    ids=["lora", "rslora", "dora", "both"],
)
def test_what_is_added_is_what_was_asked_for(settings, scale, saved, engine_of, plain, make_batch, losses):
    """By hand: W + scale B A, for DoRA with rows of the lengths that were learnt, which began as those of W."""
    folder = saved("untied")
    engine, base = engine_of(folder, **settings), weights(plain(folder))
    before = {key: value.clone() for key, value, _ in engine.weights.parts()}
    teach(engine, make_batch, losses.likelihood)
    tensors, merged = {key: value for key, value, _ in engine.weights.parts()}, weights(engine)
    name = "model.layers.1.mlp.down_proj"
    a, b = (tensors[f"{name}.lora_{part}.default.weight"] for part in "AB")
    expected = base[f"{name}.weight"] + scale * b @ a
    length = f"{name}.lora_magnitude_vector.default.weight"
    assert (length in tensors) == ("dora" in settings)
    if "dora" in settings:
        torch.testing.assert_close(before[length], base[f"{name}.weight"].norm(dim=1), rtol=0, atol=1e-6)
        assert (tensors[length] - before[length]).abs().max() > 1e-3
        expected = expected / expected.norm(dim=1, keepdim=True) * tensors[length][:, None]
    torch.testing.assert_close(merged[f"{name}.weight"], expected, rtol=0, atol=1e-6)
    said = engine.adapter_config()
    assert (said["r"], said["lora_alpha"]) == (4, 8)
    assert (said["use_dora"], said["use_rslora"]) == ("dora" in settings, "rslora" in settings)


def first_a(engine):
    return {key: value for key, value, _ in engine.weights.parts() if ".lora_A." in key}


def test_the_first_a_depends_on_the_seed_and_the_layer(saved, engine_of):
    folder = saved("qwen3")
    one, again, other = (first_a(engine_of(folder, targets=("q_proj",), seed=seed)) for seed in (3, 3, 4))
    assert same(one, again)
    assert not any(torch.equal(one[name], other[name]) for name in one)
    first, second = one.values()
    assert not torch.equal(first, second)


@pytest.mark.parametrize("targets", [("q_proj",), ("experts.gate_up_proj",)], ids=["layers", "experts"])
def test_the_first_a_has_the_spread_that_peft_gives_it(targets, saved, engine_of):
    """Uniform within 1 / sqrt(inputs), as torch begins a linear layer; or gaussian of deviation 1 / rank."""
    folder = saved("qwen3_moe")
    uniform, gaussian = (first_a(engine_of(folder, targets=targets, init=init)) for init in ("default", "gaussian"))
    for values in uniform.values():
        assert 0.9 / 32**0.5 < values.abs().max() <= 1 / 32**0.5
    for values in gaussian.values():
        assert values.std() == pytest.approx(1 / 4, rel=0.25)


def test_what_begins_from_the_weights_begins_at_their_largest_directions(saved, engine_of):
    engine = engine_of(saved("qwen3"), init="pissa")
    name = "model.layers.0.self_attn.q_proj"
    tensors = {key: value for key, value, _ in engine.weights.parts()}
    scale = 8 / 4
    product = scale * tensors[f"{name}.lora_B.default.weight"] @ tensors[f"{name}.lora_A.default.weight"]
    u, s, v = torch.linalg.svd(tensors[f"{name}.base_layer.weight"])
    torch.testing.assert_close(product, u[:, :4] @ torch.diag(s[:4]) @ v[:4], rtol=1e-4, atol=1e-6)


def test_only_the_adapter_has_masters_and_gradients_and_the_base_lies_in_compute_precision(
    saved, engine_of, make_batch, losses
):
    engine = engine_of(saved("qwen3"), {"compute_dtype": "bfloat16"}, init="pissa")
    teach(engine, make_batch, losses.likelihood, 1)
    assert engine.weights.masters
    assert all(".default." in name for name in engine.weights.masters)
    assert {str(master.dtype) for master in engine.weights.masters.values()} == {"torch.float32"}
    assert {str(p.dtype) for p in engine.model.parameters()} == {"torch.bfloat16"}
    held = {name: str(tensor.dtype) for name, tensor, _ in engine.weights.parts()}
    assert {dtype for name, dtype in held.items() if ".lora_" in name} == {"torch.float32"}
    assert {dtype for name, dtype in held.items() if ".lora_" not in name} == {"torch.bfloat16"}
    state = {id(p) for p in engine.update.optimizer.state}
    assert state == {id(master) for master in engine.weights.masters.values()}


def test_a_bfloat16_base_begins_unchanged_too(saved, engine_of, plain, make_batch):
    folder, batch = saved("qwen3"), make_batch()
    engine = engine_of(folder, {"compute_dtype": "bfloat16"}, init="pissa")
    base = plain(folder, compute_dtype="bfloat16")
    with engine.disable_adapter():
        assert torch.equal(engine.infer_batch(batch).logprobs, base.infer_batch(batch).logprobs)
    merged = weights(engine)
    for name, weight in weights(base).items():
        torch.testing.assert_close(merged[name], weight, rtol=0, atol=2e-3, check_dtype=False, msg=name)
    q = "model.layers.0.self_attn.q_proj.weight"
    assert merged[q].dtype == torch.float32
    torch.testing.assert_close(merged[q], weights(base)[q].float(), rtol=0, atol=1e-6)


# --------------------------------------------------------------------------------------------------------- value models


def test_a_value_model_trains_its_head_in_full_and_exports_both(saved, engine_of, plain, make_batch, losses, tmp_path):
    folder, batch = saved("qwen3"), make_batch(seed=8)
    engine = engine_of(folder, {"compute_dtype": "bfloat16"}, model_type="value_model")
    teach(engine, make_batch, losses.values)
    head = engine.weights.masters["score.weight"]
    assert head.dtype == torch.float32
    assert head.abs().max() > 0
    expected = engine.infer_batch(batch).values
    engine.export_hf(tmp_path / "merged")
    whole = plain(tmp_path / "merged", model_type="value_model", compute_dtype="bfloat16")
    torch.testing.assert_close(whole.infer_batch(batch).values, expected, rtol=0, atol=0.05)
    engine.export_adapter(tmp_path / "adapter")
    with without_progress_bars():
        body = peft.PeftModel.from_pretrained(AutoModel.from_pretrained(folder), tmp_path / "adapter")
    ids = batch.token_ids[: int(batch.cu_seqlens[1])]
    with torch.no_grad():
        states = body(ids[None]).last_hidden_state[0, :-1]
    again = engine_of(folder, {"compute_dtype": "bfloat16"}, model_type="value_model", path=str(tmp_path / "adapter"))
    assert torch.equal(again.infer_batch(batch).values, expected)
    values = states @ load_file(tmp_path / "adapter" / "value_head.safetensors")["score.weight"].T
    mask = batch.loss_mask[1 : len(ids)]
    torch.testing.assert_close(values[mask, 0], expected[1 : len(ids)][mask], rtol=0, atol=0.05)


# ---------------------------------------------------------------------------------------------------------- checkpoints


RESUMED = [{}, {"init": "pissa", "dropout": 0.2}, {"dora": True}, {"targets": ("q_proj",), "dropout": 0.5}]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("settings", RESUMED, ids=[" ".join(one) or "plain" for one in RESUMED])
def test_training_on_from_a_checkpoint_equals_training_through(
    settings, dtype, saved, engine_of, make_batch, losses, tmp_path
):
    folder, options = saved("qwen3"), {"compute_dtype": dtype, "schedule": {"name": "cosine", "warmup_steps": 3}}
    through = engine_of(folder, options, **settings)
    teach(through, make_batch, losses.likelihood)
    (tmp_path / "saved").mkdir()
    through.save_checkpoint(tmp_path / "saved")
    resumed = engine_of(folder, options, **{**settings, "seed": settings.get("seed", 0)})
    resumed.load_checkpoint(tmp_path / "saved")
    torch.manual_seed(77)  # dropout does not hang on the state of a generator
    for seed in range(3, 6):
        one, other = (engine.train_batch(make_batch(seed=seed), losses.likelihood) for engine in (through, resumed))
        assert {n: m.value for n, m in one.items()} == {n: m.value for n, m in other.items()}
    assert same(weights(through), weights(resumed))


def test_a_checkpoint_holds_the_adapter_alone(saved, engine_of, make_batch, losses, tmp_path):
    engine = engine_of(saved("qwen3"))
    teach(engine, make_batch, losses.likelihood, 1)
    engine.save_checkpoint(tmp_path)
    stored = load_file(tmp_path / part_file(MODEL, 0, 1))
    assert stored
    assert all(".lora_A.default." in name or ".lora_B.default." in name for name in stored)
    facts = json.loads((tmp_path / ENGINE_FILE).read_text())["adapter"]
    assert facts["base"]["path"] == engine.spec.model.path
    assert len(facts["base"]["digest"]) == 32


def test_a_checkpoint_of_something_else_is_refused(saved, engine_of, make_engine, make_batch, losses, tmp_path):
    folder, other = saved("qwen3"), saved("untied")
    (tmp_path / "lora").mkdir()
    (tmp_path / "full").mkdir()
    engine_of(folder).save_checkpoint(tmp_path / "lora")
    whole = make_engine(model=ModelConfig(path=str(folder)))
    whole.save_checkpoint(tmp_path / "full")
    with pytest.raises(CheckpointError, match="was written with no adapter, this run has an adapter"):
        engine_of(folder).load_checkpoint(tmp_path / "full")
    with pytest.raises(CheckpointError, match=r"was written with an adapter .*this run has no adapter"):
        whole.load_checkpoint(tmp_path / "lora")
    with pytest.raises(CheckpointError, match=r"'rank': 4.*'rank': 8"):
        engine_of(folder, rank=8).load_checkpoint(tmp_path / "lora")
    with pytest.raises(
        AdapterError, match=r"holds an adapter for .*base-qwen3 .*this run's base model is .*base-untied"
    ):
        engine_of(other).load_checkpoint(tmp_path / "lora")
    moved = folder.rename(tmp_path / "moved")
    engine_of(moved).load_checkpoint(tmp_path / "lora")  # the same weights elsewhere
    tensors = load_file(moved / "model.safetensors")
    with without_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(moved)
        model.model.layers[1].mlp.down_proj.weight.data[0, 0] += 1
        model.save_pretrained(moved)
    assert load_file(moved / "model.safetensors").keys() == tensors.keys()
    with pytest.raises(AdapterError, match="other weights"):
        engine_of(moved).load_checkpoint(tmp_path / "lora")


# ------------------------------------------------------------------------------------------------- from another adapter


@pytest.mark.parametrize("settings", [{}, {"dora": True, "rslora": True}, {"init": "pissa"}, EXPERTS], ids=str)
def test_a_run_begins_with_an_exported_adapter(settings, saved, engine_of, make_batch, losses, tmp_path):
    folder, batch = saved("qwen3_moe" if settings is EXPERTS else "qwen3"), make_batch(seed=8)
    first = engine_of(folder, **settings)
    teach(first, make_batch, losses.likelihood)
    first.export_adapter(tmp_path / "adapter")
    second = engine_of(folder, path=str(tmp_path / "adapter"))
    torch.testing.assert_close(second.infer_batch(batch).logprobs, first.infer_batch(batch).logprobs, rtol=0, atol=2e-6)
    assert second.adapter_config()["r"] == (8 if settings.get("init") == "pissa" else 4)
    teach(second, make_batch, losses.likelihood, 1)
    second.export_adapter(tmp_path / "again")
    assert (load_file(tmp_path / "again" / WEIGHTS_FILE).keys()) == load_file(
        tmp_path / "adapter" / WEIGHTS_FILE
    ).keys()


def edit(folder: Path, **changes):
    path = folder / CONFIG_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_an_adapter_that_does_not_fit_is_refused(saved, engine_of, tmp_path):
    folder, adapter = saved("qwen3"), tmp_path / "adapter"
    with pytest.raises(AdapterError, match=r"lora\.path: .*nowhere has no adapter_config\.json"):
        engine_of(folder, path=str(tmp_path / "nowhere"))
    engine_of(folder).export_adapter(adapter)
    with pytest.raises(AdapterError, match=r"nowhere has no adapter_config\.json; .* has the adapters adapter"):
        engine_of(folder, path=str(tmp_path / "nowhere"))
    with pytest.raises(AdapterError, match=r"lora\.rank: the adapter in .* has rank=4; leave the key out"):
        engine_of(folder, path=str(adapter), rank=8)
    with pytest.raises(AdapterError, match=r"lora\.init: the adapter in lora\.path decides"):
        engine_of(folder, path=str(adapter), init="pissa")
    with pytest.raises(AdapterError, match=r"adapts h\.0|adapts model\.layers\.0.*which .*base-gpt2 does not have"):
        engine_of(saved("gpt2"), path=str(adapter))
    tensors = load_file(adapter / WEIGHTS_FILE)
    q = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    save_file({**tensors, q: torch.zeros(4, 31)}, adapter / WEIGHTS_FILE)
    with pytest.raises(AdapterError, match=r"q_proj\.lora_A.* in .* is \[4, 31\], this model needs \[4, 32\]"):
        engine_of(folder, path=str(adapter))
    save_file(tensors, adapter / WEIGHTS_FILE)
    for change, message in (
        ({"peft_type": "LOHA"}, "an adapter of type LOHA, should be LORA"),
        ({"modules_to_save": ["lm_head"]}, r"should have model\.embed_tokens\.weight as \[104, 32\], and does not"),
        ({"bias": "all"}, "has bias='all'"),
        ({"init_lora_weights": "pissa"}, "was begun by pissa and changes its base model"),
    ):
        edit(adapter, peft_type="LORA", modules_to_save=None, bias="none", init_lora_weights=True)
        edit(adapter, **change)
        with pytest.raises(AdapterError, match=message):
            engine_of(folder, path=str(adapter))


@pytest.mark.parametrize(
    ("architecture", "settings", "message"),
    [
        (
            "qwen3",
            {"targets": ("q_prj",)},
            r"lora\.targets: unknown layer of .*'q_prj'; did you mean 'q_proj'\?",
        ),
        ("qwen3", {"targets": ("lm_head",)}, "lm_head is not adapted: log-probs are computed"),
        ("gpt2", {"targets": ("wte",)}, "wte is not adapted"),
        ("qwen3", {"exclude": ("v_prj",)}, r"lora\.exclude: unknown target 'v_prj'; did you mean 'v_proj'\?"),
        ("qwen3", {"targets": ("q_proj",), "exclude": ("q_proj",)}, "nothing of .* is left to adapt"),
        ("qwen3", {"init": "orthogonal", "rank": 3}, "orthogonal needs an even rank, found 3"),
        ("qwen3", {"init": "pissa", "dora": True}, "init=pissa cannot be combined with lora.dora=true"),
        ("qwen3", {"init": "pissa", "rank": 99}, r"lora\.rank = 99 is more than .*q_proj.* has; init pissa"),
        (
            "qwen3_moe",
            {**EXPERTS, "dropout": 0.1},
            r"experts\.\w+ is a weight of all experts, which takes no dora",
        ),
        (
            "deepseek",
            {"targets": ("kv_b_proj", "down_proj")},
            r"lora\.targets: model\.layers\.0\.mlp\.down_proj of .* cannot be adapted: PEFT takes its name",
        ),
        (
            "jamba",
            {"targets": ("mamba",)},
            r"lora\.targets: .*\.mamba\.dt_proj of .*: the layer around it computes with its weight itself",
        ),
        (
            "zamba",
            {"targets": ("q_proj", "in_proj")},
            r"lora\.targets: .*q_proj of .*: layers share its weight, so their adapters could not be merged",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(architecture, settings, message, saved, engine_of):
    with pytest.raises(AdapterError, match=message):
        engine_of(saved(architecture), **settings)


@pytest.mark.parametrize(
    ("architecture", "left_out", "adapted"),
    [
        ("jamba", {"dt_proj", "router"}, {"in_proj", "x_proj", "out_proj", "q_proj", "down_proj"}),
        ("nemotron_h", {"out_proj"}, {"in_proj", "q_proj", "down_proj"}),  # the fused kernel of Mamba 2 reads it
        ("deepseek", {"gate_proj", "up_proj", "down_proj"}, {"q_a_proj", "kv_b_proj", "o_proj"}),
    ],
)
def test_every_layer_that_is_adapted_by_default_learns(
    architecture, left_out, adapted, saved, engine_of, make_batch, losses
):
    engine = engine_of(saved(architecture))
    names = {layer.path.rpartition(".")[2] for layer in engine.adapter.layers.found}
    assert adapted <= names
    assert names.isdisjoint(left_out)
    engine.train_batch(make_batch(), losses.likelihood)
    still = [name for name, tensor, _ in engine.weights.parts() if ".lora_B." in name and not tensor.any()]
    assert still == []


def test_an_engine_without_an_adapter_says_so(make_engine):
    engine = make_engine()
    for ask in (engine.disable_adapter, lambda: engine.get_per_tensor_param(adapter_only=True)):
        with pytest.raises(ValueError, match="it has no adapter"):
            ask()
    assert engine.adapter_config() is None


# ------------------------------------------------------------------------------------------------------- as a reference


def full_kl(output, batch):
    return LossOutput(-output.logprobs + 0.1 * output.extras["full_kl"])


full_kl.needs = frozenset({"full_kl"})


def test_the_exact_kl_needs_no_second_model(saved, engine_of, plain, make_batch, losses, monkeypatch):
    folder = saved("untied")
    model = ModelConfig(path=str(folder))
    engine = engine_of(folder, reference=model)
    whole = plain(folder)
    monkeypatch.setattr("hone.engines.reference_head.load_head", None)  # the head of the reference is its own
    teach(engine, make_batch, losses.likelihood)
    batch = make_batch(seed=8)
    with engine.disable_adapter():
        asked = engine.infer_batch(batch, frozenset({"states"}))
    expected = whole.infer_batch(batch, frozenset({"states"}))
    torch.testing.assert_close(asked.extras["states"], expected.extras["states"], rtol=0, atol=1e-6)
    batch = batch.with_(reference_states=asked.extras["states"])
    kl = engine.infer_batch(batch, frozenset({"full_kl"})).extras["full_kl"][batch.loss_mask]
    assert (kl > 0).all()
    with engine.disable_adapter():
        none = engine.infer_batch(batch, frozenset({"full_kl"})).extras["full_kl"]
    torch.testing.assert_close(none, torch.zeros_like(none), rtol=0, atol=1e-6)
    engine.train_batch(batch, full_kl)


def test_dropout_is_for_training_only_and_differs_between_steps(saved, engine_of, make_batch, losses):
    engine = engine_of(saved("qwen3"), {"optimizer": {"lr": 1e-12}}, dropout=0.5, init="pissa")
    batch = make_batch()
    one, other = (engine.infer_batch(batch).logprobs for _ in range(2))
    assert torch.equal(one, other)
    norms = [engine.train_batch(batch, losses.likelihood)["train/grad_norm"].value for _ in range(2)]
    assert norms[0] != norms[1]
