"""Rows, the cache and the queue: what runs where, what is computed once, how much memory is taken."""

import asyncio

import pytest
import torch

from hone.rollout.builtin.cache import CacheLimits, CacheShape, KVCache
from hone.rollout.builtin.engine import BuiltinEngine
from hone.rollout.builtin.requests import StopStrings
from hone.rollout.settings import BuiltinSettings
from hone.types import GenerationRequest, SamplingParams


async def together(engine, jobs, **sampling):
    """jobs: (prompt, max_tokens) pairs."""
    return await asyncio.gather(
        *(
            engine.generate(
                GenerationRequest(str(i), prompt, SamplingParams(max_tokens=n, ignore_eos=True, seed=i, **sampling))
            )
            for i, (prompt, n) in enumerate(jobs)
        )
    )


def counts(engine):
    return {name.removeprefix("rollout/"): metric.value for name, metric in engine.metrics().items()}


PROMPT = tuple(range(20, 31))  # 11 tokens: the last is read by the first decode step, so 10 are prefilled


def test_a_group_is_prefilled_once(tiny, finish, gap):
    model = tiny("qwen3")
    engine = BuiltinEngine(BuiltinSettings(), model)
    found = finish(together(engine, [(PROMPT, 6)] * 8))
    seen = counts(engine)
    assert (seen["prefill_tokens"], seen["shared_prompt_tokens"]) == (10, 70)
    assert (seen["tokens"], seen["batch_size"]) == (48, 8)
    assert all(gap(model, PROMPT, c) < 1e-5 for c in found)


def test_a_late_member_of_a_group_copies_from_a_running_one(tiny, finish, gap):
    model = tiny("qwen3")
    engine = BuiltinEngine(BuiltinSettings(slots=2), model)
    found = finish(together(engine, [(PROMPT, 4), (PROMPT, 9), (PROMPT, 9), (PROMPT, 9)]))
    seen = counts(engine)
    assert (seen["prefill_tokens"], seen["shared_prompt_tokens"]) == (10, 30)
    assert all(gap(model, PROMPT, c) < 1e-5 for c in found)


def test_sharing_can_be_turned_off_and_changes_nothing_else(tiny, finish):
    model, jobs = tiny("qwen3"), [(PROMPT, 6)] * 4
    shared, single = (BuiltinEngine(BuiltinSettings(share_prompts=on), model) for on in (True, False))
    assert finish(together(shared, jobs)) == finish(together(single, jobs))
    assert (counts(single)["prefill_tokens"], counts(shared)["prefill_tokens"]) == (40, 10)


def test_slots_are_refilled_as_sequences_finish(tiny, finish, gap):
    """Ragged lengths through 4 slots: hardly an idle row, and every row right after all the moving."""
    model = tiny("qwen3")
    engine = BuiltinEngine(BuiltinSettings(slots=4), model)
    lengths = [3, 40, 7, 1, 12, 30, 2, 2, 25, 9, 17, 5]
    jobs = [(tuple(range(10, 12 + 3 * i)), n) for i, n in enumerate(lengths)]
    for (prompt, n), completion in zip(jobs, finish(together(engine, jobs)), strict=True):
        assert len(completion.token_ids) == n
        assert gap(model, prompt, completion) < 1e-5
    assert counts(engine)["batch_size"] > 3


def test_prefills_are_cut_by_their_budget(tiny, finish, gap):
    model = tiny("qwen3")
    engine = BuiltinEngine(BuiltinSettings(prefill_tokens=8), model)
    jobs = [(tuple(range(10, 10 + n)), 4) for n in (5, 4, 3, 40, 2, 9)]
    for (prompt, _), completion in zip(jobs, finish(together(engine, jobs)), strict=True):
        assert gap(model, prompt, completion) < 1e-5


def test_the_cache_stays_within_its_limit(tiny, finish):
    """128 tokens of cache: two sequences of up to 64 at a time, whatever the slots."""
    engine = BuiltinEngine(BuiltinSettings(kv_cache_tokens=128, max_sequence_tokens=64), tiny("qwen3"))
    finish(together(engine, [((9,) * 30, 34)] * 6))
    seen = counts(engine)
    assert seen["batch_size"] == 2
    assert seen["kv_cache_bytes"] == 128 * 256  # tokens x (2 layers x 2 heads x (8 + 8) numbers x 4 bytes)


def test_the_cache_keeps_its_content_while_it_grows():
    """With layers of two shapes: (KV heads, key size, value size) = (1, 2, 2) and (2, 4, 3)."""
    shapes = (CacheShape(1, 1, 2, 2), CacheShape(1, 2, 4, 3))
    cache = KVCache(shapes, CacheLimits(8, 512), torch.float32, torch.device("cpu"))
    cache.reserve(2, 32, live_rows=0)
    for one in (*cache.keys, *cache.values):
        one += 1
    cache.reserve(3, 64, live_rows=2)
    assert (cache.rows, cache.columns) == (4, 64)  # rows double
    assert cache.keys[0][0, :2, 0, :32].eq(1).all()
    sums = [2 * 32 * numbers for numbers in (2, 8, 2, 6)]
    assert [int(one.sum()) for one in (*cache.keys, *cache.values)] == sums
    cache.reserve(8, 64, live_rows=3)
    assert (cache.rows, cache.columns) == (8, 64)
    cache.reserve(2, 256, live_rows=2)  # 8 rows of 256 would be more than 512 tokens
    assert (cache.rows, cache.columns) == (2, 256)
    assert [int(one.sum()) for one in (*cache.keys, *cache.values)] == sums
    assert cache.bytes == 2 * 256 * (2 + 8 + 2 + 6) * 4


def test_settings_that_promise_too_much_are_refused(tiny):
    with pytest.raises(ValueError, match="context of 128"):
        BuiltinEngine(BuiltinSettings(max_sequence_tokens=129), tiny.config("qwen3"))
    with pytest.raises(ValueError, match="kv_cache_tokens=64"):
        BuiltinEngine(BuiltinSettings(max_sequence_tokens=100, kv_cache_tokens=64), tiny.config("qwen3"))


# --------------------------------------------------------------------------------------------------- stop strings


@pytest.fixture(scope="module")
def byte_tokenizer():
    """Byte-level BPE with a few merges, so that characters can lie across tokens and tokens across stop strings."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate([*alphabet, "nd", "END", "Ġw"])}
    backend = Tokenizer(models.BPE(vocabulary, [("n", "d")]))
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)
    return tokenizer, vocabulary


def first_stop(tokenizer, stop, tokens):
    strings = StopStrings(stop, tokenizer)
    return next((i for i in range(1, len(tokens) + 1) if strings.completed_by(tokens[:i])), None)


def test_stop_strings_across_tokens(byte_tokenizer):
    tokenizer, ids = byte_tokenizer
    text = [ids[symbol] for symbol in ("a", "E", "nd", "END", "Ġw", "E", "n", "d", "x")]
    assert first_stop(tokenizer, ("End",), text) == 3
    assert first_stop(tokenizer, ("D w",), text) == 5
    assert first_stop(tokenizer, ("N",), text) == 4  # inside a token
    assert first_stop(tokenizer, ("wEn", "zzz"), text) == 7
    assert first_stop(tokenizer, ("nope",), text) is None
    assert first_stop(tokenizer, ("dx",), text[:-1]) is None


def test_a_stop_string_whose_characters_lie_across_tokens(byte_tokenizer):
    tokenizer, ids = byte_tokenizer
    accented = [ids["a"], *(ids[symbol] for symbol in "Ã©"), ids["b"]]  # the two bytes of é
    assert tokenizer.decode(accented) == "aéb"
    assert first_stop(tokenizer, ("é",), accented) == 3
    assert first_stop(tokenizer, ("aé",), accented) == 3


def test_stop_strings_want_a_tokenizer(tiny, finish):
    engine = BuiltinEngine(BuiltinSettings(), tiny("qwen3"))
    with pytest.raises(ValueError, match="no tokenizer"):
        finish(engine.generate(GenerationRequest("r", (9,), SamplingParams(max_tokens=3, stop=("x",)))))
