"""Rotary positions: a token's log-prob does not depend on what else is in its row, whatever the model's `rope_type`."""

import asyncio

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hone.data.packing import Sample, pack_samples, select
from hone.engines.fsdp2.settings import Fsdp2Settings, ParallelConfig
from hone.engines.settings import EngineConfig
from hone.models.errors import ModelError
from hone.models.loading import load_language_model
from hone.models.rotary import changing_rope, fix_rotary
from hone.models.settings import BuildConfig, ModelConfig, UseConfig
from hone.rollout.builtin.engine import BuiltinEngine
from hone.rollout.settings import BuiltinSettings
from hone.types import GenerationRequest, LossOutput, SamplingParams
from hone.workers.train import TrainSpec, TrainWorker
from tests.ranks import run_ranks

SHORT, LONG, PLAIN, CONTEXT = 8, 40, 16, 48  # tokens; the plain length lies between the two sequences
HEAD = 8
OPTIONS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": PLAIN},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": PLAIN,
    },
    "longrope": {
        "short_factor": [1.0 + 0.05 * i for i in range(HEAD // 2)],
        "long_factor": [1.0 + 2.0 * i for i in range(HEAD // 2)],
        "original_max_position_embeddings": PLAIN,
    },
    "proportional": {"partial_rotary_factor": 0.5},
}
CHANGING = ("dynamic", "longrope")


def model_of(rope, context="auto"):
    build = BuildConfig(
        architecture="llama",
        hidden_size=32,
        layers=2,
        heads=4,
        kv_heads=2,
        mlp_size=48,
        max_positions=PLAIN if rope == "dynamic" else 64,
        options={"rope_parameters": {"rope_type": rope, "rope_theta": 100.0, **OPTIONS[rope]}},
        seed=3,
    )
    if context == "auto":
        context = CONTEXT if rope in CHANGING else None
    return ModelConfig(build=build, use=UseConfig(context=context))


def make_worker(rope, budget=LONG, **parallel):
    engine = EngineConfig(
        compute_dtype="float32",
        max_tokens_per_microbatch=budget,
        backend=Fsdp2Settings(parallel=ParallelConfig(**parallel)),
    )
    worker = TrainWorker(TrainSpec(model_of(rope), engine, total_steps=1))
    worker.initialize()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in sorted(worker.engine.model.named_parameters()):
            if "proj" in name:  # attention that positions matter to
                parameter.mul_(8)
    return worker


def make_batch():
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(8, 100, (length,), generator=generator).tolist() for length in (SHORT, LONG, SHORT + 3)]
    batch = pack_samples([Sample(tuple(row), (0,) + (1,) * (len(row) - 1)) for row in rows])
    return batch.with_(loss_weights=torch.full((batch.num_tokens,), 1.0))


def likelihood(output, batch):
    return LossOutput(-output.logprobs)


def test_every_type_of_transformers_is_tried():
    assert OPTIONS.keys() == {"default", *ROPE_INIT_FUNCTIONS}


@pytest.mark.parametrize("rope", OPTIONS)
def test_log_probs_and_gradients_do_not_depend_on_the_cut(rope):
    whole = make_batch()
    alone = make_worker(rope, budget=LONG)
    together = make_worker(rope, budget=256)
    expected = torch.cat([alone.infer_batch(select(whole, [i])).logprobs for i in range(3)])
    for worker in (alone, together):
        assert (worker.infer_batch(whole).logprobs - expected).abs().max() < 1e-4
    norms = [worker.train_batch(whole, likelihood)["train/grad_norm"].value for worker in (alone, together)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


@pytest.mark.parametrize("rope", CHANGING)
def test_positions_do_what_the_context_says(rope):
    """Frequencies of the long sequence, for short ones too: what transformers gives where a long one is in the call."""
    worker, batch = make_worker(rope), make_batch()
    plain = load_language_model(model_of(rope, context=None)).eval()
    plain.load_state_dict(worker.engine.model.state_dict())
    for one in plain.modules():
        if hasattr(one, "rope_type"):
            one.rope_type = rope  # as transformers made it
            one._forward_pre_hooks.clear()
    plain.set_attn_implementation("eager")
    rows = batch.token_ids.split(batch.lengths.tolist())
    padded = torch.zeros(2, CONTEXT, dtype=torch.int64)
    padded[0, :SHORT], padded[1, :LONG] = rows[0], rows[1]
    with torch.no_grad():
        logits = plain(padded, use_cache=False).logits[0, : SHORT - 1]
    expected = logits.log_softmax(-1).gather(1, rows[0][1:, None])[:, 0]
    found = worker.infer_batch(select(batch, [0])).logprobs[1:]
    assert (found - expected).abs().max() < 1e-4
    with torch.no_grad():
        short = plain(rows[0][None], use_cache=False).logits[0, : SHORT - 1]
    unscaled = short.log_softmax(-1).gather(1, rows[0][1:, None])[:, 0]
    assert (found - unscaled).abs().max() > 0.01


def sequence_parallel(rope, ranks):
    worker = make_worker(rope, sequence=ranks) if ranks > 1 else make_worker(rope)
    batch = make_batch()
    found = worker.infer_batch(batch).logprobs
    return {"logprobs": found, "norm": worker.train_batch(batch, likelihood)["train/grad_norm"].value}


@pytest.mark.slow
@pytest.mark.parametrize("rope", CHANGING)
def test_two_ranks_that_share_a_row_agree_with_one_process(rope):
    alone = sequence_parallel(rope, 1)
    for rank in run_ranks(2, sequence_parallel, rope, 2):
        assert (rank["logprobs"] - alone["logprobs"]).abs().max() < 1e-4
        assert rank["norm"] == pytest.approx(alone["norm"], rel=1e-4)


@pytest.mark.parametrize("path", ["fused", "generic"])
@pytest.mark.parametrize("rope", OPTIONS)
def test_the_rollout_samples_with_the_same_frequencies(rope, path):
    """A short and a long sequence at a time; the short one is the trainer's, too."""
    worker = make_worker(rope, budget=256)
    settings = BuiltinSettings(execution=path, max_sequence_tokens=CONTEXT if rope in CHANGING else None)
    engine = BuiltinEngine(settings, worker.engine.model)
    prompts = [(10, 11, 12), tuple(range(20, 50))]

    async def sample():
        asked = SamplingParams(max_tokens=6, ignore_eos=True, seed=5)
        return await asyncio.gather(
            *(engine.generate(GenerationRequest(str(i), p, asked)) for i, p in enumerate(prompts))
        )

    sampled = asyncio.run(sample())
    rows = [Sample((*p, *one.token_ids), (0,) * len(p) + (1,) * 6) for p, one in zip(prompts, sampled, strict=True)]
    batch = pack_samples(rows)
    theirs = torch.tensor([logprob for one in sampled for logprob in one.logprobs])
    assert (worker.infer_batch(batch).logprobs[batch.loss_mask] - theirs).abs().max() < 1e-4


@pytest.mark.parametrize("rope", CHANGING)
def test_a_sequence_beyond_the_context_is_an_error(rope):
    engine = EngineConfig(compute_dtype="float32", max_tokens_per_microbatch=256)
    worker = TrainWorker(TrainSpec(model_of(rope, context=None), engine))
    worker.initialize()
    batch = make_batch()
    worker.infer_batch(select(batch, [0]))
    with pytest.raises(ValueError, match=r"a sequence of 40 tokens.*laid out for 16; set model\.use\.context"):
        worker.infer_batch(batch)


def test_a_context_that_nothing_would_use_is_refused():
    with pytest.raises(ModelError, match=r"model\.use\.context=48 .*'llama' has neither; remove it"):
        load_language_model(model_of("linear", context=48))


def test_an_unknown_type_is_refused(monkeypatch):
    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "dynamic_sideways", ROPE_INIT_FUNCTIONS["linear"])
    model = load_language_model(model_of("linear"))
    model.model.rotary_emb.rope_type = "dynamic_sideways"
    with pytest.raises(ModelError, match="rope_type 'dynamic_sideways' is not known to keep its frequencies"):
        fix_rotary(model, None, "it")


def test_what_changes_is_read_from_the_config():
    changing = {rope: changing_rope(load_language_model(model_of(rope)).config) for rope in OPTIONS}
    assert changing == dict.fromkeys(OPTIONS) | {"dynamic": ("dynamic", PLAIN), "longrope": ("longrope", PLAIN)}
