"""Models with convolution and recurrent layers in the built-in engine: their states follow the rows."""

import asyncio

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hone.models.numerics import products
from hone.rollout.builtin.engine import BuiltinEngine
from hone.rollout.builtin.states import bytes_of
from hone.rollout.settings import BuiltinSettings
from hone.types import GenerationRequest, SamplingParams, StopReason
from tests.rollout.conftest import SIZES
from tests.rollout.test_prefixes import ALL, OPENING, answers, converse, counted

LAYERS = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3}
MAMBA2 = {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 16}
DELTA = dict.fromkeys(("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"), 4)
CONFIGS = {
    "qwen3_5_text": LAYERS | DELTA | {"linear_num_key_heads": 2},  # gated DeltaNet
    "nemotron_h": MAMBA2 | {"layers_block_type": [*LAYERS["layer_types"], "mlp"], "ssm_state_size": 8},  # Mamba 2
    "jamba": {  # Mamba 1
        "num_hidden_layers": 3,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},  # a convolution alone
    "minimax": LAYERS | {"num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 16},  # lightning attention
    "falcon_h1": {  # Mamba 2 and attention in one layer
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_d_state": 8,
        "mamba_n_groups": 2,
        "mamba_chunk_size": 16,
    },
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 16},  # no attention
}
CLOSE = 5e-5  # in log-probs; a state that is stale or of another row shows as 0.1 and more
PROMPTS = [tuple(range(10, 10 + n)) for n in (12, 12, 1, 3, 30)]


def hybrid(kind, dtype=torch.float32):
    torch.manual_seed(0)
    fields = AutoConfig.for_model(kind).to_dict().keys()
    sizes = {
        key: size for key, size in SIZES.items() if key in fields and not (kind == "nemotron_h" and "layers" in key)
    }
    config = AutoConfig.for_model(kind, **{**sizes, **CONFIGS[kind]})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for weight in model.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    return model.to(dtype)


def engine_of(model, **settings):
    return BuiltinEngine(BuiltinSettings(**settings), model)


async def generate(engine, prompts, start=0, **sampling):
    wanted = {"max_tokens": 10, "ignore_eos": True, **sampling}
    return await asyncio.gather(
        *(
            engine.generate(GenerationRequest(str(start + i), prompt, SamplingParams(**{"seed": start + i, **wanted})))
            for i, prompt in enumerate(prompts)
        )
    )


@pytest.mark.parametrize("kind", CONFIGS)
def test_logprobs_equal_the_plain_forward(kind, finish, gap):
    """Two equal prompts that share a prefill, others of several lengths and of a single token; slots for three."""
    model = hybrid(kind)
    engine = engine_of(model, slots=3)
    completions = finish(generate(engine, PROMPTS))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert gap(model, prompt, completion) < CLOSE
    assert engine.metrics()["rollout/shared_prompt_tokens"].value == 11
    if kind in ("qwen3_5_text", "nemotron_h"):
        alone = [finish(generate(engine, [prompt], start=i))[0] for i, prompt in enumerate(PROMPTS)]
        assert [one.token_ids for one in alone] == [one.token_ids for one in completions]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qwen3_5_text", "nemotron_h", "lfm2", "jamba"])
def test_a_row_begins_without_the_state_of_the_request_that_had_it_before(kind, dtype, finish):
    """A prompt of one token has no prefill, which would write the row's state."""
    model = hybrid(kind, dtype)
    engine = engine_of(model, slots=2, dtype=str(dtype).removeprefix("torch."))
    wanted = [(PROMPTS[0], 4), (PROMPTS[3], 24), ((20,), 6), ((21,), 6)]  # the first row is free again, and used twice

    async def together():
        return await asyncio.gather(
            *(generate(engine, [prompt], start=i, max_tokens=most) for i, (prompt, most) in enumerate(wanted))
        )

    for i, ((prompt, most), (found,)) in enumerate(zip(wanted, finish(together()), strict=True)):
        (alone,) = finish(generate(engine_of(model, dtype=engine._settings.dtype), [prompt], start=i, max_tokens=most))
        assert found.token_ids == alone.token_ids
        assert found.logprobs == pytest.approx(alone.logprobs, abs=1e-4 if dtype == torch.float32 else 0.05)


async def _interrupted(engine, model):
    """Requests whose states have to be made anew: after a sleep, new weights, and in the middle of others."""
    first = [asyncio.create_task(generate(engine, [prompt], start=i)) for i, prompt in enumerate(PROMPTS[2:])]
    for _ in range(6):
        await asyncio.sleep(0)
    late = asyncio.create_task(generate(engine, PROMPTS[3:], start=10))  # prompts of rows that run
    for _ in range(4):
        await asyncio.sleep(0)
    await engine.sleep(1)
    await engine.wake_up()
    for _ in range(3):
        await asyncio.sleep(0)
    await engine.update_weights(model.state_dict().items(), 1)
    found = [one for task in first for one in await task]
    return found + await late


@pytest.mark.parametrize("kind", ["qwen3_5_text", "nemotron_h"])
def test_states_are_made_anew_where_they_were_lost(kind, finish, gap):
    model = hybrid(kind)
    engine = engine_of(model, slots=4)
    found = finish(_interrupted(engine, model))
    for prompt, completion in zip([*PROMPTS[2:], *PROMPTS[3:]], found, strict=True):
        assert gap(model, prompt, completion) < CLOSE
    assert engine.metrics()["rollout/recomputed_tokens"].value > 0


async def _aborted(engine):
    running = [asyncio.create_task(generate(engine, [prompt], start=i)) for i, prompt in enumerate(PROMPTS[2:])]
    for _ in range(6):
        await asyncio.sleep(0)
    await engine.abort_all()
    parts = [(await task)[0] for task in running]
    longer = [(*prompt, *part.token_ids) for prompt, part in zip(PROMPTS[2:], parts, strict=True)]
    return (
        parts,
        longer,
        await generate(engine, longer, start=20, keep_kv=True),
        await generate(engine, longer, start=30),
    )


def test_an_aborted_answer_goes_on_from_its_tokens(finish, gap):
    model = hybrid("qwen3_5_text")
    engine = engine_of(model, slots=4)
    parts, longer, kept, again = finish(_aborted(engine))
    assert {part.stop_reason for part in parts} == {StopReason.ABORTED}
    assert all(part.token_ids for part in parts)
    for prompt, part in zip(PROMPTS[2:], parts, strict=True):
        assert gap(model, prompt, part) < CLOSE
    for prompt, *both in zip(longer, kept, again, strict=True):
        assert all(gap(model, prompt, answer) < CLOSE for answer in both)


@pytest.mark.parametrize("kind", CONFIGS)
def test_three_turns_go_on_from_the_states_of_the_last_block_and_answer_to_the_bit_as_without(
    kind, finish, gap, monkeypatch
):
    # oneDNN's last bits depend on how many rows it multiplies, and a turn that goes on has fewer
    monkeypatch.setattr(products, "_chosen", {torch.float32: products.TORCH})
    model = hybrid(kind)
    kept, anew = (engine_of(model, kept_kv_tokens=most) for most in (1024, 0))
    found, expected = finish(converse(kept)), finish(converse(anew))
    whole = sum(ALL), 0
    assert counted(kept) == (whole if kind == "jamba" else (39 + (67 - 32) + (95 - 64), 32 + 64))  # see `goes_on`
    assert counted(anew) == whole
    assert answers(found) == answers(expected)
    assert max(gap(model, prompt, one) for prompt, one in found) < CLOSE


def test_states_of_several_turns_follow_rows_that_share_and_move(finish, gap):
    """More conversations than slots, some of them with one opening, whose rows are copied and moved."""
    model = hybrid("qwen3_5_text")
    engine = engine_of(model, slots=3)
    openings = [OPENING, OPENING, OPENING[:5], OPENING[::-1], (*OPENING[:33], 99), OPENING[3:], OPENING]

    async def story():
        return await asyncio.gather(*(converse(engine, f"{i}", one, 2 + i % 2) for i, one in enumerate(openings)))

    for turns in finish(story()):
        assert all(gap(model, prompt, one) < CLOSE for prompt, one in turns)
    assert counted(engine)[1] > 0


def test_kept_states_are_bounded_counted_and_given_back(finish):
    model = hybrid("mamba2")
    engine = engine_of(model, slots=2)
    for first in range(4):
        finish(converse(engine, f"{first}", (60 + first, *OPENING), turns=2))
    prefixes = engine._scheduler.batch.cache.prefixes
    conv, recurrent = (64 + 2 * 2 * 8) * 4, 4 * 16 * 8
    assert bytes_of(next(iter(prefixes._ends.values()))) == 2 * (conv + recurrent) * 4
    assert len(prefixes._ends) == 2
    finish(engine.sleep(1))
    assert engine._scheduler.batch.cache.bytes == prefixes.bytes == 0


def test_memory_of_states_is_counted_and_given_back(finish):
    engine = engine_of(hybrid("mamba2"), slots=4)
    finish(generate(engine, PROMPTS[:2]))
    conv, recurrent = (64 + 2 * 2 * 8) * 4, 4 * 16 * 8  # of each layer: channels x kernel, heads x head x state
    cache = engine._scheduler.batch.cache
    assert cache.bytes == 16 * 2 * (conv + recurrent) * 4  # rows, layers, values of float32
    finish(engine.sleep(1))
    assert cache.bytes == 0


def test_states_that_are_not_in_a_cache_are_refused():
    config = AutoConfig.for_model("recurrent_gemma", vocab_size=32, hidden_size=16, num_hidden_layers=3)
    with pytest.raises(
        ValueError, match="its layers carry a state from token to token, which would leak between packed sequences"
    ):
        BuiltinEngine(BuiltinSettings(), config)
