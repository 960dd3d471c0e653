"""Layers with a state in bfloat16: what transformers keeps in float32 stays so; what is sent is computed with."""

import asyncio

import pytest
import torch
from safetensors.torch import load_file

from hone.data.packing import select
from hone.engines.settings import LoraConfig, OptimizerConfig
from hone.models.loading import load_language_model
from hone.models.numerics.precision import wide_weights
from hone.models.settings import ModelConfig
from hone.models.vision.model import auto_class
from hone.rollout.builtin.engine import BuiltinEngine
from hone.rollout.settings import BuiltinSettings
from hone.weights.in_process import sync
from hone.workers.rollout import engine_config
from tests.families import every
from tests.families.checks import DEADLINE_S, likelihood, make_batch, make_engine, make_worker
from tests.families.types import save_tiny, tiny_config
from tests.ranks import run_ranks

MADE_SO = ["olmo_hybrid", "zamba", "hunyuan_v1_moe"]
IN_PROPORTION = OptimizerConfig(lr=1.0, options={"eps": 1e3})  # a step of AdamW is g / 1000


@pytest.mark.parametrize(
    "kind", ["nemotron_h", "qwen3_5_text", "kimi_linear", "minimax", "lfm2_moe", "olmo_hybrid", "zamba"]
)
def test_what_transformers_keeps_in_float32_is_kept(kind, tmp_path):
    folder = save_tiny(kind, tmp_path / "model")
    plain = auto_class(kind).from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    held = load_language_model(ModelConfig(path=str(folder), dtype="bfloat16")).state_dict()
    assert held.keys() == plain.keys()
    narrow = {name for name, weight in held.items() if weight.dtype == torch.bfloat16}
    assert not {name for name in narrow if plain[name].dtype == torch.float32}
    assert any(name.endswith("A_log") for name in narrow) == (kind in ("nemotron_h", "qwen3_5_text", "kimi_linear"))


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


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # in a class of transformers
def test_every_class_of_transformers_makes_in_float32_what_is_kept_so():
    differ = {}
    for kind in (kind for kind, row in every.read().items() if not row[every.RUN]):
        with torch.device("meta"):
            model = auto_class(kind).from_config(tiny_config(kind), dtype=torch.bfloat16)
        wide = wide_weights(model)
        made = {name for name, weight in model.named_parameters() if weight.dtype == torch.float32 and not wide(name)}
        differ |= {kind: made} if made else {}
    assert not differ


def trained(folder, lora):
    """Run by each rank: weights before a step with its sequences, after it, as sent, and as read from a checkpoint."""
    adapter = LoraConfig(rank=4) if lora else None
    engine = make_engine(folder, compute_dtype="bfloat16", optimizer=IN_PROPORTION, max_grad_norm=None, lora=adapter)
    batch, ranks = make_batch(0), engine.ranks
    own = [one for one in range(batch.num_sequences) if one % ranks.data_parallel_size == ranks.data_parallel_rank]
    before = dict(engine.get_per_tensor_param()[0])
    norm = engine.train_batch(select(batch, own), likelihood)["train/grad_norm"].value
    kept, sent = dict(engine.get_per_tensor_param()[0]), dict(engine.get_per_tensor_param(dtype=torch.bfloat16)[0])
    saved = folder / f"checkpoint-{ranks.world}"
    saved.mkdir(exist_ok=True)
    engine.save_checkpoint(saved)
    engine.export_hf(folder / f"export-{ranks.world}")
    engine.train_batch(select(batch, own), likelihood)
    engine.load_checkpoint(saved)
    again = dict(engine.get_per_tensor_param()[0])
    tensors = {"before": before, "kept": kept, "sent": sent, "again": again}
    return {"norm": norm} | {f"{when} {name}": one for when, some in tensors.items() for name, one in some.items()}


def require_float32(found, export, lora):
    """Check that float32 parameters are unrounded and equal in every form; return what was learnt."""
    sent = {name.removeprefix("sent "): one for name, one in found.items() if name.startswith("sent ")}
    wide = [name for name in sorted(sent) if sent[name].dtype == torch.float32]
    assert wide
    files = load_file(export / "model.safetensors")
    for name in wide:
        kept = found[f"kept {name}"]
        assert kept.dtype == files[name].dtype == torch.float32
        assert not torch.equal(kept, kept.bfloat16().float())
        assert torch.equal(sent[name], kept)
        assert torch.equal(files[name], kept)
        assert torch.equal(found[f"again {name}"], kept)
    learnt = torch.cat([(found[f"kept {name}"] - found[f"before {name}"]).flatten() for name in wide])
    assert bool(learnt.any()) != lora
    return learnt


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "lora"), [("olmo_hybrid", False), ("olmo_hybrid", True), ("zamba", False)])
def test_two_ranks_keep_in_float32_what_one_process_keeps_and_learn_the_same(kind, lora, tmp_path):
    folder = save_tiny(kind, tmp_path / "model")
    alone, (first, second) = trained(folder, lora), run_ranks(2, trained, folder, lora)
    expected = require_float32(alone, folder / "export-1", lora)
    assert first["norm"] == pytest.approx(alone["norm"], rel=0.01)
    for rank in (first, second):
        learnt = require_float32(rank, folder / "export-2", lora)
        assert torch.linalg.vector_norm(learnt - expected) <= 0.05 * torch.linalg.vector_norm(expected)
    assert all(torch.equal(first[name], second[name]) for name in first if name != "norm")


@pytest.mark.parametrize("kind", MADE_SO)
def test_the_rollout_serves_in_float32_what_the_trainer_keeps_so(kind, tmp_path):
    folder = save_tiny(kind, tmp_path / "model")
    trainer = make_worker(folder, compute_dtype="bfloat16")
    trainer.train_batch(make_batch(0), likelihood)
    settings = BuiltinSettings(max_sequence_tokens=64, slots=4, dtype="bfloat16")
    rollout = BuiltinEngine(settings, engine_config(ModelConfig(path=str(folder)), "bfloat16"))
    weights = trainer.weights(torch.bfloat16)
    asyncio.run(asyncio.wait_for(sync(weights, rollout.update_weights, 1), DEADLINE_S))  # raises if a digest differs
    computed = dict(trainer.engine.model.named_parameters())
    wide = {name for name, weight in computed.items() if weight.dtype == torch.float32}
    served = rollout.weights()
    assert wide == {name for name, weight in served.items() if weight.dtype == torch.float32}
    assert wide
    assert all(torch.equal(served[name], computed[name].detach()) for name in wide)
