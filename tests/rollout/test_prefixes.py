"""KV between the turns of a conversation: what is prefilled, counted by hand, and answers equal to those without it."""

import asyncio
from dataclasses import replace

import pytest
import torch

from hone.rollout.builtin.engine import BuiltinEngine
from hone.rollout.builtin.prefixes import BLOCK, Prefixes
from hone.rollout.settings import BuiltinSettings
from hone.types import GenerationRequest, SamplingParams

OPENING = tuple(range(8, 48))  # 40 tokens
OBSERVATION = tuple(range(50, 58))  # 8
ANSWER = 20  # tokens of each turn, so the prompts of three turns have 40, 68 and 96 tokens
ALL = (39, 67, 95)  # the last token of a prompt is read by the first step


async def converse(engine, tag="a", opening=OPENING, turns=3, between=None, **sampling):
    """The prompt and the completion of each turn."""
    found, prompt = [], opening
    for turn in range(turns):
        if turn and between is not None:
            await between(turn)
        wanted = SamplingParams(ANSWER, ignore_eos=True, seed=turn, keep_kv=turns > 1, **sampling)
        completion = await engine.generate(GenerationRequest(f"{tag}/{turn}", prompt, wanted))
        found.append((prompt, completion))
        prompt = (*prompt, *completion.token_ids, *OBSERVATION)
    return found


def counted(engine):
    """Tokens prefilled, and tokens found."""
    figures = engine.metrics()
    return tuple(figures[f"rollout/{name}"].value for name in ("prefill_tokens", "cached_prompt_tokens"))


def answers(turns):
    return [(one.token_ids, one.logprobs, one.weight_versions) for _, one in turns]


@pytest.mark.parametrize(
    "kind",
    [
        *("qwen3", "llama_yarn", "qwen3_moe", "mistral_window", "gemma2", "gpt_oss", "gpt2", "generic", "bfloat16"),
        *("llama4", "gemma4"),
    ],
)
def test_three_turns_prefill_each_block_once_and_answer_to_the_bit_as_without(kind, tiny, finish, gap):
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    path = "generic" if kind == "generic" else "auto"
    model = tiny("qwen3" if kind in ("generic", "bfloat16") else kind, dtype=dtype)
    kept, anew = (BuiltinEngine(BuiltinSettings(execution=path, kept_kv_tokens=n), model) for n in (1024, 0))
    found = finish(converse(kept))
    assert counted(kept) == (39 + (67 - 32) + (95 - 64), 32 + 64)
    assert answers(found) == answers(finish(converse(anew)))
    assert counted(anew) == (sum(ALL), 0)
    assert max(gap(model, prompt, one) for prompt, one in found) < (1e-5 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "gpt_oss", "llama4", "deepseek_v32"])
def test_the_attention_of_accelerators(kind, tiny, finish, gap):
    """One call for all queries of a prompt, after the kept ones: run here on a CPU, where it rounds otherwise."""
    model = tiny(kind)
    engine = BuiltinEngine(BuiltinSettings(), model)
    engine._scheduler.batch.cache._in_blocks = False
    found = finish(converse(engine))
    assert counted(engine)[1] == 96
    assert max(gap(model, prompt, one) for prompt, one in found) < 1e-5


def test_company_changes_nothing(tiny, finish):
    """Rows that begin with kept KV, beside others that do not, more of them than slots."""
    model = tiny("qwen3")
    alone, together = BuiltinEngine(BuiltinSettings(), model), BuiltinEngine(BuiltinSettings(slots=3), model)
    openings = [OPENING, OPENING[:5], OPENING[::-1], (*OPENING[:33], 99), OPENING[3:]]

    async def story():
        return await asyncio.gather(*(converse(together, f"{i}", one) for i, one in enumerate(openings)))

    for opening, found in zip(openings, finish(story()), strict=True):
        alone._scheduler.batch.cache.release()
        assert answers(found) == answers(finish(converse(alone, opening=opening)))
    assert counted(together)[1] > 0


def test_experts_of_kept_tokens_are_returned(tiny, finish):
    kept, anew = (BuiltinEngine(BuiltinSettings(kept_kv_tokens=n), tiny("qwen3_moe")) for n in (1024, 0))
    found, expected = (finish(converse(engine, routed_experts=True)) for engine in (kept, anew))
    assert counted(kept)[1] == 96
    for (prompt, one), (_, other) in zip(found, expected, strict=True):
        assert len(one.routed_experts) == len(prompt) + ANSWER - 1
        assert (one.routed_experts == other.routed_experts).all()
    finish(converse(kept, "plain", turns=2))
    assert counted(kept)[1] == 32, "without experts, KV is found by itself: the first turn found none"


@pytest.mark.parametrize("keep_cache", [False, True])
def test_new_weights_between_two_turns_drop_what_was_kept(keep_cache, tiny, finish, gap):
    old, new = tiny("qwen3"), tiny("qwen3", seed=1)
    engine = BuiltinEngine(BuiltinSettings(), old)
    engine.keep_cache = keep_cache

    async def update(turn):
        if turn == 2:
            await engine.update_weights(new.state_dict().items(), 1)

    found = finish(converse(engine, between=update))
    assert counted(engine) == (39 + 35 + 95, 32)
    assert [set(one.weight_versions) for _, one in found] == [{0}, {0}, {1}]
    assert gap(new, *found[2]) < 1e-5


def test_kv_of_several_weights_is_not_kept(tiny, finish, gap):
    """With `keep_cache` a turn goes on under new weights with its old KV; its next turn computes its prompt anew."""
    old, new = tiny("qwen3"), tiny("qwen3", seed=1)
    engine = BuiltinEngine(BuiltinSettings(), old)
    engine.keep_cache = True

    async def story():
        running = asyncio.create_task(converse(engine, turns=2))
        while engine._scheduler.batch.counters.tokens < 5:
            await asyncio.sleep(0)
        await engine.update_weights(new.state_dict().items(), 1)
        return await running

    found = finish(story())
    assert set(found[0][1].weight_versions) == {0, 1}
    assert counted(engine) == (39 + 67, 0)
    assert gap(new, *found[1]) < 1e-5


@pytest.mark.parametrize("verb", ["sleep", "fail"])
def test_memory_is_given_back(verb, tiny, finish):
    engine = BuiltinEngine(BuiltinSettings(), tiny("qwen3"))

    async def between(turn):
        assert engine._scheduler.batch.cache.prefixes.bytes == turn * 32 * 256  # 2 layers x 2 heads x 16 x 4 bytes
        if verb == "sleep":
            await engine.sleep(1)
            assert engine._scheduler.batch.cache.bytes == 0
            await engine.wake_up()
        else:
            engine._scheduler.fail_all("a step failed", None)

    finish(converse(engine, between=between, turns=2))
    assert counted(engine) == (39 + 67, 0)


def test_a_single_turn_neither_keeps_nor_finds_anything(tiny, finish):
    """Its prompt is computed as in an engine that never kept any: in one call, not in blocks."""
    engine = BuiltinEngine(BuiltinSettings(), tiny("qwen3"))
    finish(converse(engine, turns=1))
    assert not len(engine._scheduler.batch.cache.prefixes)
    finish(converse(engine, turns=2))
    counted(engine)
    finish(converse(engine, turns=1))
    assert counted(engine) == (39, 0)


def test_a_single_turn_and_a_turn_of_several_do_not_share_a_prefill(tiny, finish):
    engine = BuiltinEngine(BuiltinSettings(kept_kv_tokens=0), tiny("qwen3"))
    turn = SamplingParams(4, ignore_eos=True, keep_kv=True)

    async def story():
        both = (
            engine.generate(GenerationRequest(f"{one.keep_kv}", OPENING, one))
            for one in (turn, replace(turn, keep_kv=False))
        )
        await asyncio.gather(*both)

    finish(story())
    assert counted(engine) == (2 * 39, 0)


def test_what_is_kept_for_one_owner_is_not_found_by_another(tiny, finish):
    engine = BuiltinEngine(BuiltinSettings(), tiny("qwen3"))

    async def ask(owner):
        await engine.generate(
            GenerationRequest(owner, OPENING, SamplingParams(4, ignore_eos=True, keep_kv=True, cache_owner=owner))
        )
        return counted(engine)[1]

    async def story():
        found = [await ask(owner) for owner in ("alice", "bob", "alice")]
        together = (
            GenerationRequest(f"{owner} again", (*OPENING, 9), SamplingParams(4, ignore_eos=True, cache_owner=owner))
            for owner in ("alice", "bob")
        )
        await asyncio.gather(*map(engine.generate, together))
        return found, counted(engine)[0]

    found, prefilled = finish(story())
    assert found[:2] == [0, 0] < found[2:]
    assert prefilled == 2 * 40  # nor do they share a prefill


def test_the_memory_is_bounded_and_the_longest_unused_goes_first(tiny, finish):
    """Room for two blocks: of three conversations, the second turn of the first finds nothing any more."""
    model = tiny("qwen3")
    engine = BuiltinEngine(BuiltinSettings(kept_kv_tokens=2 * BLOCK + 5), model)

    async def others(turn):
        for first in (60, 70):
            await converse(engine, f"other{first}", (first, *OPENING), turns=2)

    finish(converse(engine, turns=2, between=others))
    assert counted(engine)[1] == 32 + 32, "the others' second turns"
    assert len(engine._scheduler.batch.cache.prefixes) == 2


# -------------------------------------------------------------------------------------------------- the store itself

ROOT = ("", False)


def kv(tokens, mark=0.0):
    return [torch.full((1, 1, tokens, 2), mark), torch.full((1, 1, tokens, 2), -mark)]


def found(prefixes, tokens, root=ROOT):
    return [float(block.tensors[0].mean()) for block in prefixes.find(root, tokens)]


def test_blocks_are_found_by_all_tokens_before_them():
    prefixes = Prefixes(10 * BLOCK)
    first, second = tuple(range(BLOCK)), tuple(range(100, 100 + BLOCK))
    prefixes.keep(ROOT, (*first, *second, 5), kv(65, 1.0), None)
    prefixes.keep(ROOT, second, kv(32, 2.0), None)
    prefixes.keep(("other", False), (*first, *first), kv(64, 3.0), None)
    assert found(prefixes, (*first, *second, 5)) == [1.0, 1.0]
    assert found(prefixes, (*first, *second[:-1], 5)) == [1.0]
    assert found(prefixes, second) == [2.0]
    assert found(prefixes, (*second, *first)) == [2.0]
    assert found(prefixes, first[:-1]) == []
    assert found(prefixes, (*first, *first), ("other", False)) == [3.0, 3.0]
    assert found(prefixes, first, ("", True)) == []
    assert len(prefixes) == 5


def test_a_common_beginning_is_held_once_and_outlives_its_ends():
    prefixes = Prefixes(3 * BLOCK)
    start = tuple(range(BLOCK))
    ends = [tuple(range(n, n + BLOCK)) for n in (100, 200, 300)]
    for number, end in enumerate(ends):
        prefixes.keep(ROOT, (*start, *end), kv(64, 1.0 + number), None)
    assert len(prefixes) == 3
    assert [found(prefixes, (*start, *end)) for end in ends] == [[1.0], [1.0, 2.0], [1.0, 3.0]]
