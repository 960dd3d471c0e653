"""The check at start-up finds any leak between packed sequences, whatever its size and the run's precision."""

import pytest
import torch
from transformers import AutoConfig, AutoModel

from hone.data.packing import select
from hone.engines.checks import isolation
from hone.engines.checks.isolation import check_isolation, refuse_for_states
from hone.engines.layout import lay_out
from hone.models import loading
from hone.models.attention import packed
from hone.models.attention.packed import Packing
from hone.models.errors import ModelError
from hone.models.settings import BuildConfig, ModelConfig
from tests.engines.bounded import KERNELS, plant

SIZES = {"hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "mlp_size": 48, "max_positions": 128}
LINEAR = ["linear_attention", "full_attention"]
HYBRIDS = {
    "qwen3_5_text": {
        "layer_types": LINEAR,
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "nemotron_h": {
        "layers_block_type": LINEAR,
        "head_dim": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": None},
}
JAMBA = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "mamba_d_state": 4,
    "mamba_dt_rank": 4,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
}
KINDS = HYBRIDS | {"jamba": JAMBA}
PUBLISHED = ("qwen3_next", "nemotron_h", "deepseek_v3", "gemma3_text", "falcon_h1", "gpt2")


def model_of(architecture, options, **sizes):
    sizes = {**SIZES, **sizes}
    if architecture == "nemotron_h":  # its kinds of layers say how many there are
        del sizes["layers"]
    return ModelConfig(build=BuildConfig(**sizes, architecture=architecture, options=options))


def results(engine, batch, loss):
    """Log-probs and gradients."""
    logprobs = engine.infer_batch(batch).logprobs
    engine.forward_backward(batch, loss)
    found = {name: weight.grad.clone() for name, weight in engine.weights.masters.items()}
    engine.weights.clear_gradients()
    return logprobs, found


@pytest.mark.parametrize("architecture", HYBRIDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 3e-2)])
def test_packed_sequences_score_and_learn_as_alone(architecture, dtype, tolerance, make_engine, make_batch, losses):
    """In one row with shared prompts, in rows of one or two sequences, and in another order."""
    model = model_of(architecture, HYBRIDS[architecture])
    shared = make_batch(lengths=(13, 9, 70, 7, 20, 12), prompt=6, groups=[0, 0, 1, 2, 1, 0])
    assert lay_out(shared).packing.num_tokens == shared.num_tokens - 3 * 6
    engine, small = (
        make_engine(model=model, compute_dtype=dtype, max_tokens_per_microbatch=most) for most in (200, 70)
    )
    one, of_one = results(engine, shared, losses.policy)
    alone = shared.with_(group_index=torch.arange(6))
    other, of_other = results(engine, alone, losses.policy)
    torch.testing.assert_close(one, other, rtol=tolerance, atol=10 * tolerance)
    _, reordered = results(small, select(alone, [5, 3, 1, 4, 0, 2]), losses.policy)
    for name, grad in of_one.items():
        for found in (of_other, reordered):
            assert (found[name] - grad).norm() <= tolerance * max(float(grad.norm()), 0.01), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["lfm2", "jamba", "qwen3_5_text"])
def test_a_layer_that_sees_the_whole_row_is_refused(architecture, dtype, make_engine, monkeypatch):
    monkeypatch.setattr(loading, "separate_sequences", lambda model: None)
    with pytest.raises(ModelError, match="where other sequences are in the row"):
        make_engine(model=model_of(architecture, KINDS[architecture]), compute_dtype=dtype)


@pytest.mark.parametrize("architecture", KERNELS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 3e-2)])
def test_kernels_that_honour_bounds_get_the_row_without_padding(
    architecture, dtype, tolerance, make_engine, make_batch, losses, monkeypatch
):
    model = model_of(architecture, HYBRIDS[architecture], mlp_size=56)
    batches = [make_batch(lengths=(13, 9, 70, 7, 20, 12)), make_batch(lengths=(13, 9, 12), prompt=2, groups=[0, 0, 0])]
    settings = {"model": model, "compute_dtype": dtype, "max_tokens_per_microbatch": 200}
    engine = make_engine(**settings)
    expected = [results(engine, batch, losses.policy) for batch in batches]
    calls = plant(architecture, monkeypatch)
    engine = make_engine(**settings)
    for one in calls:
        one.clear()
    for batch, (logprobs, grads) in zip(batches, expected, strict=True):
        before = [one.total() for one in calls]
        found, gradients = results(engine, batch, losses.policy)
        assert all(one.total() > count for one, count in zip(calls, before, strict=True))
        torch.testing.assert_close(found, logprobs, rtol=tolerance, atol=10 * tolerance)
        for name, grad in grads.items():
            assert (gradients[name] - grad).norm() <= tolerance * max(float(grad.norm()), 0.01), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("architecture", "deaf"), [(name, one) for name, both in KERNELS.items() for one in both])
def test_kernels_that_ignore_bounds_get_padded_batches(
    architecture, deaf, dtype, make_engine, make_batch, losses, monkeypatch, caplog
):
    size = 64 + 8 * (dtype == "float32") + 16 * (deaf == "causal_conv1d_fn")  # a config that no other test has proven
    model = model_of(architecture, HYBRIDS[architecture], mlp_size=size)
    calls = plant(architecture, monkeypatch, deaf=deaf)
    engine = make_engine(model=model, compute_dtype=dtype)
    assert "do not keep the sequences of a row apart by its bounds" in caplog.text
    assert all(one.total() for one in calls)
    before = [one.total() for one in calls]
    results(engine, make_batch(lengths=(13, 9, 20)), losses.policy)
    assert [one.total() for one in calls] == before


def leaky(attend):
    """Attention in which the sequences after the first see each other."""

    def joined(q, k, v, packing, scoring):
        first, total = packing.lengths[0], packing.num_tokens
        ends = torch.tensor([0, first, total] if len(packing.lengths) > 1 else [0, total])
        return attend(q, k, v, Packing.of(ends), scoring)

    return joined


def faint(attend):
    """Attention with a millionth of the first value of the row, which no comparison of values sees."""

    def leaking(q, k, v, packing, scoring):
        return attend(q, k, v, packing, scoring) + 1e-9 * v[:, :1, :1]

    return leaking


def looking_ahead(attend):
    """Attention with a little of each sequence's last value."""

    def ahead(q, k, v, packing, scoring):
        last = packing.cu_seqlens[1:].long() - 1
        lengths = torch.tensor(packing.lengths)
        return attend(q, k, v, packing, scoring) + 1e-9 * v[:, :1, last].repeat_interleave(lengths, 2)

    return ahead


@pytest.mark.parametrize(
    ("plant", "message", "width"),
    [
        (leaky, "where other sequences are in the row", 49),
        (faint, "depends on another sequence", 50),
        (looking_ahead, "depends on a later token|depends on another sequence", 51),
    ],
)
def test_a_leak_in_attention_of_any_size_is_found(plant, message, width, make_engine, monkeypatch):
    monkeypatch.setattr(packed, "attend", plant(packed.attend))
    with pytest.raises(ModelError, match=message):
        make_engine(model=model_of("qwen3", {}, mlp_size=width))  # a config that no other test has proven


def test_a_model_that_mixes_no_tokens_is_refused(make_engine, monkeypatch):
    monkeypatch.setattr(packed, "attend", lambda q, k, v, packing, scoring: v.repeat_interleave(2, 1))
    with pytest.raises(ModelError, match="does not depend on the token before it"):
        make_engine(model=model_of("qwen3", {}, mlp_size=52))


@pytest.mark.parametrize("architecture", PUBLISHED)
def test_a_published_model_is_checked_on_a_small_one_with_every_kind_of_layer(architecture):
    with torch.device("meta"):
        body = AutoModel.from_config(AutoConfig.for_model(architecture))
    small = isolation._small_copy(body, architecture)
    assert isolation._kinds(small) == isolation._kinds(body)
    assert sum(weight.numel() for weight in small.parameters()) < 3e7
    assert {weight.dtype for weight in small.parameters()} == {torch.float32}


def test_ranks_that_split_a_sequence_are_refused_for_layers_with_a_state(make_engine):
    body = make_engine(model=model_of("lfm2", HYBRIDS["lfm2"])).model.base_model
    refuse_for_states(body, "LFM2", {"actor.backend.parallel.sequence": False})
    with pytest.raises(ModelError, match=r"^actor.backend.parallel.sequence: LFM2 .*Lfm2ShortConv.*; remove it"):
        refuse_for_states(body, "LFM2", {"actor.backend.compile": False, "actor.backend.parallel.sequence": True})


def test_the_check_does_not_touch_the_random_generator():
    body = AutoModel.from_config(
        AutoConfig.for_model("qwen3", vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    )
    before = torch.get_rng_state()
    check_isolation(body, "qwen3", training=True)
    assert torch.equal(before, torch.get_rng_state())
