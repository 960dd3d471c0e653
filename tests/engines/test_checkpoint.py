"""An engine's checkpoint: exact to the bit, strict about what it restores; and the export."""

import json
import threading

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hone.engines.checkpoint.files import ENGINE_FILE, MODEL, OPTIMIZER, CheckpointError, part_file
from hone.engines.export import export_weights
from hone.engines.optimizers import EIGHT_BIT
from hone.models.loading import without_progress_bars
from hone.models.settings import BuildConfig, ModelConfig
from hone.models.tokenizer import load_tokenizer

MODEL_FILE, OPTIMIZER_FILE = (part_file(kind, 0, 1) for kind in (MODEL, OPTIMIZER))
OPTIMIZERS = ["AdamW", "SGD", "Adafactor", "NAdam", "ASGD", "Rprop", *EIGHT_BIT]
OPTIONS = {"SGD": {"momentum": 0.9}} | {name: {"min_8bit_size": 1024} for name in EIGHT_BIT}
SCHEDULE = {"name": "cosine", "warmup_steps": 3}


def weights(engine):
    return {name: tensor.clone() for name, tensor in engine.weights.whole()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_on_from_a_checkpoint_equals_training_through(
    optimizer, dtype, make_engine, make_batch, losses, tmp_path
):
    settings = {
        "compute_dtype": dtype,
        "schedule": SCHEDULE,
        "optimizer": {"name": optimizer, "lr": 1e-3, "options": OPTIONS.get(optimizer, {})},
    }
    batches = [make_batch(seed=seed) for seed in range(6)]
    through = make_engine(**settings)
    for batch in batches[:3]:
        through.train_batch(batch, losses.policy)
    through.save_checkpoint(tmp_path)
    resumed = make_engine(**settings, model=ModelConfig(build=BuildConfig(**SIZES, seed=9)))
    resumed.load_checkpoint(tmp_path)
    restored, saved = weights(resumed), weights(through)
    assert all(torch.equal(restored[name], saved[name]) for name in saved)
    for batch in batches[3:]:
        one, other = (engine.train_batch(batch, losses.policy) for engine in (through, resumed))
        assert {n: m.value for n, m in one.items()} == {n: m.value for n, m in other.items()}
    one, other = weights(through), weights(resumed)
    assert all(torch.equal(one[name], other[name]) for name in one)
    states = [one for one in resumed.update.optimizer.state.values() if one]
    quantised = any(value.dtype == torch.uint8 for one in states for value in one.values() if torch.is_tensor(value))
    assert quantised == (optimizer in EIGHT_BIT)


SIZES = {"hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "mlp_size": 48, "max_positions": 64}


@pytest.fixture
def saved(make_engine, make_batch, losses, tmp_path):
    engine = make_engine()
    engine.train_batch(make_batch(), losses.policy)
    engine.save_checkpoint(tmp_path)
    return tmp_path


def test_it_holds_tensors_and_json_only_and_each_weight_once(saved):
    assert sorted(path.name for path in saved.iterdir()) == [ENGINE_FILE, MODEL_FILE, OPTIMIZER_FILE]
    stored = load_file(saved / MODEL_FILE)
    assert ("model.embed_tokens.weight" in stored) != ("lm_head.weight" in stored)
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    assert json.loads((saved / ENGINE_FILE).read_text())["schedule_step"] == 1


def test_saved_tensors_do_not_follow_the_live_ones(saved, make_engine, make_batch, losses):
    engine = make_engine()
    engine.load_checkpoint(saved)
    before = load_file(saved / MODEL_FILE)
    engine.train_batch(make_batch(), losses.policy)
    after = load_file(saved / MODEL_FILE)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_checkpoint_that_does_not_fit_is_named(saved, make_engine):
    with pytest.raises(CheckpointError, match="written with AdamW, this run's optimizer is SGD"):
        make_engine(optimizer={"name": "SGD"}).load_checkpoint(saved)
    with pytest.raises(CheckpointError, match=r"belong to another model: they lack \['model\.layers\.2"):
        make_engine(model=ModelConfig(build=BuildConfig(**SIZES | {"layers": 3}))).load_checkpoint(saved)
    with pytest.raises(CheckpointError, match=r"gate_proj.*\[48, 32\], this run has .*\[40, 32\]"):
        make_engine(model=ModelConfig(build=BuildConfig(**SIZES | {"mlp_size": 40}))).load_checkpoint(saved)


@pytest.mark.parametrize("name", [ENGINE_FILE, MODEL_FILE, OPTIMIZER_FILE])
def test_a_truncated_or_missing_file_is_named_and_the_engine_is_left_alone(name, saved, make_engine):
    engine = make_engine()
    before = weights(engine)
    (saved / name).write_bytes((saved / name).read_bytes()[:-40])
    with pytest.raises(CheckpointError, match=f"{name} is truncated or damaged"):
        engine.load_checkpoint(saved)
    (saved / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        engine.load_checkpoint(saved)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(engine).items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_the_export_loads_in_transformers_to_the_same_model(
    dtype, architecture, make_engine, make_batch, losses, tmp_path
):
    options = {"num_experts": 4, "num_experts_per_tok": 2} if architecture == "qwen3_moe" else {}
    build = BuildConfig(**SIZES, architecture=architecture, options=options)
    engine = make_engine(model=ModelConfig(build=build), compute_dtype=dtype)
    engine.train_batch(make_batch(), losses.policy)
    engine.export_hf(tmp_path)
    with without_progress_bars():
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto", attn_implementation="sdpa").eval()
    assert str(loaded.dtype) == f"torch.{dtype}"
    tokens = torch.randint(8, 104, (1, 17))
    engine.model.eval().set_attn_implementation("sdpa")
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, engine.model.state_dict()[name]), name
    with torch.no_grad():
        tolerance = 1e-5 if dtype == "float32" else 2e-2  # our norms round elsewhere
        torch.testing.assert_close(loaded(tokens).logits, engine.model(tokens).logits, rtol=tolerance, atol=tolerance)
    assert load_tokenizer(ModelConfig(path=str(tmp_path)))("abc").input_ids == [74, 75, 76]


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_an_export_in_several_files_loads_too(architecture, make_engine, tmp_path, monkeypatch):
    monkeypatch.setattr("hone.engines.export.FILE_BYTES", 20_000)
    options = {"num_experts": 4, "num_experts_per_tok": 2} if architecture == "qwen3_moe" else {}
    build = BuildConfig(**SIZES, architecture=architecture, options=options)
    engine = make_engine(model=ModelConfig(build=build))
    export_weights(engine.model, engine.get_per_tensor_param()[0], tmp_path, writes=True)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 1
    with without_progress_bars():
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    state = engine.model.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())


def test_a_value_model_is_saved_and_restored(make_engine, make_batch, losses, tmp_path):
    engine, batch = make_engine(model_type="value_model"), make_batch()
    engine.train_batch(batch, losses.values)
    engine.save_checkpoint(tmp_path)
    again = make_engine(model_type="value_model")
    again.load_checkpoint(tmp_path)
    assert torch.equal(again.infer_batch(batch).values, engine.infer_batch(batch).values)
    (tmp_path / "hf").mkdir()
    engine.export_hf(tmp_path / "hf")
    loaded = make_engine(model_type="value_model", model=ModelConfig(path=str(tmp_path / "hf")))
    assert torch.equal(loaded.infer_batch(batch).values, engine.infer_batch(batch).values)


def test_what_is_written_while_training_goes_on_is_the_state_at_the_call(tmp_path, make_engine, make_batch, losses):
    engine, batch = make_engine(optimizer={"lr": 1e-2}), make_batch()
    engine.train_batch(batch, losses.likelihood)
    now, behind = tmp_path / "now", tmp_path / "behind"
    now.mkdir()
    behind.mkdir()
    engine.save_checkpoint(now)
    disk_is_free = threading.Event()
    engine._checkpoint._writer.start([lambda: disk_is_free.wait(30) and None])
    engine.save_checkpoint(behind, wait=False)
    engine.train_batch(batch, losses.likelihood)
    assert not engine.checkpoint_written()
    assert {path.name for path in behind.iterdir()} == {"engine.json"}
    disk_is_free.set()
    assert engine.checkpoint_written(wait=True)
    for path in now.iterdir():
        assert path.read_bytes() == (behind / path.name).read_bytes(), path.name


def test_a_file_that_cannot_be_written_is_an_error_when_it_is_asked_for(tmp_path, make_engine):
    engine = make_engine()
    engine.save_checkpoint(tmp_path, wait=False)
    engine.checkpoint_written(wait=True)
    (tmp_path / "model-00000-of-00001.safetensors").unlink()
    (tmp_path / "model-00000-of-00001.safetensors").mkdir()
    engine.save_checkpoint(tmp_path, wait=False)
    with pytest.raises(OSError, match="directory"):
        engine.checkpoint_written(wait=True)
