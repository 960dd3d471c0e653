"""torchtitan's decoder under transformers' names: the table, what is refused, and what the head is asked for."""

import types

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

pytest.importorskip("torchtitan")

import hone_torchtitan.quiet_import as quiet_import  # isort: skip
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

from hone.data.packing import select
from hone.models.errors import ModelError
from hone.models.loading import without_progress_bars
from hone.types import TopK
from hone_torchtitan.modules import PackedAttention
from hone_torchtitan.names import MODULES, transformers_name
from tests.engines.contract.cases import Mesh, make_batch, make_engine, own_part, scores, train, weights
from tests.ranks import run_ranks

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 8}
ALONE = Mesh("fsdp2", 1)
EVERYTHING = frozenset({"entropy", "sum_pi_squared", TopK(5), "logprobs_at", "states", "full_kl"})


def save(folder, config):
    with without_progress_bars(), torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * 0.1)
        model.save_pretrained(folder)
    return folder


def test_names_are_those_of_torchtitans_own_adapter():
    theirs = Qwen3StateDictAdapter(types.SimpleNamespace(), None).from_hf_map
    dense = {ours: name for name, ours in theirs.items() if ours is not None and ".moe." not in ours}
    assert {ours: transformers_name(ours.format(7), False) for ours in dense} == {
        ours: name.format(7) for ours, name in dense.items()
    }
    assert len(dense) == len(MODULES) + 3
    assert transformers_name("layers.3.attention.qkv_linear.wq.bias", True) == "body.layers.3.self_attn.q_proj.bias"
    assert transformers_name("lm_head.weight", True) == "score.weight"
    with pytest.raises(KeyError, match=r"layers\.1\.mystery\.weight has no Hugging Face name"):
        transformers_name("layers.1.mystery.weight", False)


def test_other_versions_are_refused():
    with pytest.raises(ImportError, match=r"torchtitan 0\.4\.1 is installed.*torchtitan==0\.3\.0"):
        quiet_import.require_version("0.4.1")


def refused(mesh, folder, settings, message):
    with pytest.raises((ValueError, ModelError)) as error:
        make_engine(mesh, folder, **settings)
    assert message in str(error.value), str(error.value)


def refuse_all(bad):
    for one in bad:
        refused(*one)
    return {}


@pytest.mark.slow
def test_what_is_not_built_is_an_error_that_names_it(tmp_path):
    models = {
        "plain": Qwen3Config(vocab_size=104, head_dim=16, **SIZES),
        "experts": Qwen3MoeConfig(vocab_size=104, head_dim=16, num_experts=2, moe_intermediate_size=16, **SIZES),
        "biases": LlamaConfig(vocab_size=104, attention_bias=True, **SIZES),
        "gelu": LlamaConfig(vocab_size=104, hidden_act="gelu", **SIZES),
        "dynamic": LlamaConfig(
            vocab_size=104, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, **SIZES
        ),
        "odd": Qwen3Config(vocab_size=104, head_dim=16, **{**SIZES, "intermediate_size": 47}),
    }
    folders = {name: save(tmp_path / name, config) for name, config in models.items()}
    two, split = Mesh("torchtitan", 2), Mesh("torchtitan", 2, {"tensor": 2})
    plain, lacks = folders["plain"], "backend torchtitan does not have "
    bad = [
        (Mesh("torchtitan", 2, {"tensor": 3}), plain, {}, "tensor = 3 does not divide 2 ranks"),
        (Mesh("torchtitan", 2, {"replicate": 2, "tensor": 2}), plain, {}, "tensor = 2 does not divide 1 of 2 ranks"),
        (Mesh("torchtitan", 2, {"shard": 2, "tensor": 2}), plain, {}, "shard = 2, but 1 of 2 ranks are left for it"),
        (Mesh("torchtitan", 2, {"sequence": True}), plain, {}, "sequence = true needs"),
        (two, plain, {"lora": {"rank": 2}}, f"{lacks}lora"),
        (two, plain, {"moe": {}}, f"{lacks}moe"),
        (two, plain, {"activation_checkpointing": "offload"}, f"{lacks}activation_checkpointing=offload"),
        (two, plain, {"model": {"use": {"dropout": 0.1}}}, f"{lacks}use.dropout"),
        (two, plain, {"compute_dtype": "float64", "model": {"dtype": "float64"}}, f"{lacks}compute_dtype=float64"),
        (two, plain, {"optimizer": {"name": "Muon", "options": {}}}, "Muon orthogonalises"),
        (two, folders["experts"], {}, "is a 'qwen3_moe' model, and the torchtitan engine builds llama, mistral"),
        (two, folders["biases"], {}, "has attention_bias=True in its config.json"),
        (two, folders["gelu"], {}, "has hidden_act='gelu' in its config.json"),
        (two, folders["dynamic"], {}, "has rotary positions of type 'dynamic'"),
        (split, folders["odd"], {}, "tensor = 2 does not divide the 47 intermediate_size"),
    ]
    run_ranks(2, refuse_all, bad)


def outputs(mesh, folder):
    """Every output that a loss can ask for; this model is its own reference, so `full_kl` is 0 without a change."""
    engine = make_engine(mesh, folder, reference=str(folder))
    batch = make_batch(1)
    part = select(batch, own_part(engine, batch))
    part = part.with_(ids_at=torch.stack([part.token_ids, part.token_ids.flip(0)], 1))
    states = engine.infer_batch(part, frozenset({"states"})).extras["states"]
    found = engine.infer_batch(part.with_(reference_states=states * 1.1), EVERYTHING)
    return {"logprobs": found.logprobs, "entropy": found.entropy, **found.extras}


@pytest.mark.slow
def test_a_split_head_answers_all_questions_of_a_loss(tmp_path):
    """113 tokens: the second rank has fewer rows of the head than the first. The rotary positions are scaled."""
    folder = save(tmp_path, LlamaConfig(vocab_size=113, tie_word_embeddings=False, rope_parameters=YARN, **SIZES))
    wanted = outputs(ALONE, folder)
    assert set(wanted) == {"logprobs", "entropy", "sum_pi_squared", "states", "full_kl", "logprobs_at"} | {
        "top_k_ids",
        "top_k_logprobs",
    }
    assert float(wanted["full_kl"].max()) > 1e-4
    for rank in run_ranks(2, outputs, Mesh("torchtitan", 2, {"tensor": 2, "sequence": True}), folder):
        assert rank.keys() == wanted.keys()
        for key, value in wanted.items():
            torch.testing.assert_close(rank[key], value, rtol=1e-5, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")


def calls(mesh, folder, checkpointing):
    """How often attention runs in a training step."""
    engine = make_engine(mesh, folder, activation_checkpointing=checkpointing)
    counted = 0
    forward = PackedAttention.forward

    def count(*arguments, **more):
        nonlocal counted
        counted += 1
        return forward(*arguments, **more)

    PackedAttention.forward = count
    train(engine, [0])
    PackedAttention.forward = forward
    return {"calls": counted, **weights(engine)}


@pytest.mark.slow
def test_layers_are_computed_again_in_the_backward(tmp_path):
    folder = save(tmp_path, Qwen3Config(vocab_size=104, head_dim=16, tie_word_embeddings=True, **SIZES))
    (plain,), (again,) = (run_ranks(1, calls, Mesh("torchtitan", 1), folder, on) for on in (False, True))
    assert again.pop("calls") == 2 * plain.pop("calls") > 0
    assert all(torch.equal(again[name], plain[name]) for name in plain)


def scored_again(mesh, folder, saved):
    """Log-probs before training, after it, and with the weights from before loaded again."""
    engine = make_engine(mesh, folder)
    engine.save_checkpoint(saved)
    before = scores(engine)
    train(engine, [0])
    after = scores(engine)
    engine.load_checkpoint(saved)
    again = scores(engine)
    kept = all(torch.equal(again[key], before[key]) for key in before)
    return {"kept": kept, "moved": all(not torch.equal(after[key], before[key]) for key in before)}


@pytest.mark.slow
def test_a_head_that_was_gathered_to_score_is_gathered_anew(tmp_path):
    """torchtitan's sharding keeps the head gathered after a forward; weights that are loaded then must count."""
    folder = save(tmp_path / "model", Qwen3Config(vocab_size=104, head_dim=16, **SIZES))
    saved = tmp_path / "saved"
    saved.mkdir()
    for rank in run_ranks(2, scored_again, Mesh("torchtitan", 2), folder, saved):
        assert rank == {"kept": True, "moved": True}
