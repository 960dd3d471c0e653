"""What is generated: the right tokens, with the right log-probs, ended where they should be."""

import asyncio
import json
from dataclasses import replace

import pytest
import torch

from hone.rollout.router import Router
from hone.rollout.settings import RolloutConfig
from hone.types import GenerationRequest, SamplingParams, StopReason
from tests.rollout.contract.conftest import Served


def test_greedy_is_the_argmax_of_the_plain_forward(bench, finish, forward, gap):
    prompts = bench.prompts(8)
    for prompt, completion in zip(prompts, finish(bench.all(prompts, temperature=0.0)), strict=True):
        logits = forward(bench.model, (*prompt, *completion.token_ids))[len(prompt) - 1 : -1]
        assert completion.token_ids == tuple(logits.argmax(-1).tolist())
        assert gap(bench.model, prompt, completion) < bench.tolerance


def test_logprobs_are_those_of_the_plain_forward(bench, finish, gap):
    prompts = bench.prompts(12)
    for prompt, completion in zip(prompts, finish(bench.all(prompts)), strict=True):
        assert len(completion.token_ids) == len(completion.logprobs) == len(completion.weight_versions) == 16
        assert gap(bench.model, prompt, completion) < bench.tolerance


def test_a_prompt_has_the_logprobs_of_the_plain_forward(bench, finish, forward):
    """With a completion, and alone; without alternatives, and with the five most likely tokens at each place."""
    engine = bench.engine
    if isinstance(bench, Served):  # a run asks a server through the router
        engine = Router([engine], RolloutConfig(), bench.tokenizer)

    async def ask(prompt, name, **sampling):
        wanted = SamplingParams(**{"max_tokens": 4, "ignore_eos": True, "temperature": 0.0, **sampling})
        return await engine.generate(GenerationRequest(name, prompt, wanted))

    _, long, short = bench.prompts(3)
    for prompt in (long, short):
        plain = finish(ask(prompt, "plain"))
        alone = finish(ask(prompt, "alone", prompt_logprobs=0, max_tokens=0))
        both = finish(ask(prompt, "both", prompt_logprobs=5))
        assert plain.prompt_scores is None
        assert (alone.token_ids, alone.stop_reason) == ((), StopReason.LENGTH)
        assert both.token_ids == plain.token_ids
        expected = forward(bench.model, prompt)[:-1].log_softmax(-1)
        own = expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        for scored in (alone.prompt_scores, both.prompt_scores):
            assert scored.logprobs[0] == 0.0
            torch.testing.assert_close(torch.tensor(scored.logprobs[1:]), own, atol=1e-4, rtol=0)
        assert alone.prompt_scores.top_ids == ()
        likely, ids = expected.topk(5)
        assert both.prompt_scores.top_ids[0] == ()
        assert torch.tensor(both.prompt_scores.top_ids[1:]).tolist() == ids.tolist()
        torch.testing.assert_close(torch.tensor(both.prompt_scores.top_logprobs[1:]), likely, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="names the adapter 'judge'"):
        finish(ask(short, "other", prompt_logprobs=0, adapter="judge"))
    with pytest.raises(ValueError, match="prompt_logprobs should be at least 0, found -1"):
        finish(ask(short, "less", prompt_logprobs=-1))


def test_an_answer_follows_a_json_schema_or_is_refused(bench, finish):
    """Engines that constrain answers do; its log-probs are those of the tokens that the schema allows."""
    schema = '{"enum": ["ab", "cd"]}'

    async def ask(**sampling):
        wanted = SamplingParams(**{"max_tokens": 12, "json_schema": schema, **sampling})
        return await bench.engine.generate(GenerationRequest("json", bench.prompts(2)[1], wanted))

    if not bench.constrains:
        with pytest.raises(ValueError, match=r"(the built-in rollout engine|builtin-\d) has no such constraint"):
            finish(ask())
        return
    found = finish(ask())
    text = bench.tokenizer.decode(found.token_ids, skip_special_tokens=True)
    assert json.loads(text) in ("ab", "cd")
    assert sum(logprob < -1e-3 for logprob in found.logprobs) <= 2, "most places have one allowed token"
    assert any(logprob < -1e-3 for logprob in found.logprobs), "two answers are allowed: neither has probability 1"


def test_logprobs_are_those_of_the_filtered_distribution(bench, finish, forward):
    """The filters, straightforwardly: sort, cut, renormalise, one row at a time."""
    rules = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.02}
    prompts = bench.prompts(6)
    for prompt, completion in zip(prompts, finish(bench.all(prompts, **rules)), strict=True):
        rows = forward(bench.model, (*prompt, *completion.token_ids))[len(prompt) - 1 : -1]
        for row, token, logprob in zip(rows, completion.token_ids, completion.logprobs, strict=True):
            p, order = (row / 0.7).softmax(-1).sort(descending=True)
            if bench.min_p_first:
                p = p[p >= 0.02 * p[0]]
            p = p[:20] if bench.joint_filters else p[:20] / p[:20].sum()
            kept = int((p.cumsum(0) - p < 0.8).sum())
            p = p[:kept] / p[:kept].sum()
            p = p[p >= 0.02 * p[0]]
            p /= p.sum()
            place = order.tolist().index(token)
            assert place < len(p), "a token that the filters exclude"
            assert abs(float(p[place].log()) - logprob) < bench.tolerance


def test_a_seed_decides_and_nothing_else(bench, finish):
    """Alone or together, in this order or the other, in whatever slot: a request's tokens are the same."""
    prompts = bench.prompts(7)

    async def alone(i):
        return await bench.engine.generate(
            GenerationRequest("x", prompts[i], SamplingParams(max_tokens=16, ignore_eos=True, seed=i))
        )

    async def backwards():
        wanted = [SamplingParams(max_tokens=16, ignore_eos=True, seed=i) for i in range(7)]
        order = list(reversed(range(7)))
        found = await asyncio.gather(
            *(bench.engine.generate(GenerationRequest(f"y{i}", prompts[i], wanted[i])) for i in order)
        )
        return list(reversed(found))

    together = finish(bench.all(prompts))
    for others in ([finish(alone(i)) for i in range(7)], finish(backwards())):
        assert [c.token_ids for c in others] == [c.token_ids for c in together]
        for one, two in zip(others, together, strict=True):
            assert torch.allclose(torch.tensor(one.logprobs), torch.tensor(two.logprobs), atol=bench.tolerance)


def test_samples_of_one_prompt_differ_by_their_seeds_only(bench, finish):
    prompt = bench.prompts(2)[1]
    found = finish(bench.all([prompt] * 8))
    assert len({c.token_ids for c in found}) == 8
    assert len({c.token_ids for c in finish(bench.all([prompt] * 8, seed=5))}) == 1


def test_ends_at_a_stop_id_and_keeps_it(bench, finish):
    prompts = bench.prompts(4)
    free = finish(bench.all(prompts))
    wanted = free[0].token_ids[5]
    for whole, cut in zip(free, finish(bench.all(prompts, stop_token_ids=(wanted, 103))), strict=True):
        ends = [i for i, token in enumerate(whole.token_ids) if token in (wanted, 103)]
        assert cut.token_ids == (whole.token_ids[: ends[0] + 1] if ends else whole.token_ids)
        assert cut.stop_reason == (StopReason.STOP if ends else StopReason.LENGTH)


def test_ends_at_the_models_end_of_sequence_unless_told_not_to(bench, finish):
    prompts = bench.prompts(2) * 12
    free = finish(bench.all(prompts, max_tokens=40))
    assert any(2 in c.token_ids[:-1] for c in free), "the tiny model never says <eos>: the test proves nothing"
    for whole, cut in zip(free, finish(bench.all(prompts, max_tokens=40, ignore_eos=False)), strict=True):
        length = whole.token_ids.index(2) + 1 if 2 in whole.token_ids else 40
        assert cut.token_ids == whole.token_ids[:length]
        assert cut.stop_reason == (StopReason.STOP if 2 in whole.token_ids else StopReason.LENGTH)


def test_ends_at_a_stop_string_with_the_token_that_completes_it(bench, finish):
    prompts = bench.prompts(6)
    free = finish(bench.all(prompts))
    stop = bench.tokenizer.decode(free[0].token_ids[4:6])
    for whole, cut in zip(free, finish(bench.all(prompts, stop=("no such text", stop))), strict=True):
        prefixes = [whole.token_ids[:n] for n in range(1, 17)]
        expected = next((ids for ids in prefixes if stop in bench.tokenizer.decode(ids)), whole.token_ids)
        assert cut.token_ids == expected
    assert finish(bench.all(prompts[:1], stop=(stop,)))[0].stop_reason is StopReason.STOP


def test_ends_at_its_length_and_at_the_context_window(bench, finish):
    one = finish(bench.all(bench.prompts(3), max_tokens=1))
    assert [len(c.token_ids) for c in one] == [1, 1, 1]
    assert all(c.stop_reason is StopReason.LENGTH for c in one)
    (full,) = finish(bench.all([(9,) * 120], max_tokens=1000))  # the model's context is 128
    assert (len(full.token_ids), full.stop_reason) == (8, StopReason.LENGTH)


def test_512_requests_at_once(bench, finish):
    prompts = bench.prompts(2)[1:] * 512
    found = finish(bench.all(prompts, max_tokens=3))
    assert [c.request_id for c in found] == [f"r{i}" for i in range(512)]
    assert all(len(c.token_ids) == 3 for c in found)
    alone = finish(bench.all(prompts[:1], max_tokens=3, seed=400))
    assert alone[0].token_ids == found[400].token_ids


def test_prompts_that_are_more_at_once_than_an_engine_reads_in_one_step(bench, finish):
    """Some are cut in the middle then, if the engine does that; the sampled tokens are the same."""
    prompts = [one for one in bench.prompts(300, longest=110) if len(one) > 60]
    assert sum(map(len, prompts)) > 10_000
    found = finish(bench.all(prompts, max_tokens=4))
    for place in range(0, len(prompts), 40):
        alone = finish(bench.all([prompts[place]], max_tokens=4, seed=place))[0]
        assert found[place].token_ids == alone.token_ids


def test_a_later_turn_finds_the_prompt_of_the_turn_before(bench, finish):
    opening = (*bench.prompts(2, longest=40)[1],)
    how = SamplingParams(8, ignore_eos=True, keep_kv=True)
    first = finish(bench.engine.generate(GenerationRequest("1/0/0/0", opening, how)))
    bench.engine.metrics()
    prompt = (*opening, *first.token_ids, 9)
    greedy = replace(how, temperature=0.0)
    second = finish(bench.engine.generate(GenerationRequest("1/0/0/1", prompt, greedy)))
    assert bench.engine.metrics()["rollout/cached_prompt_tokens"].value >= 32
    finish(bench.update(bench.weights(bench.model), 1))
    anew = finish(bench.engine.generate(GenerationRequest("2/0/0/1", prompt, greedy)))
    assert bench.engine.metrics()["rollout/cached_prompt_tokens"].value == 0
    assert second.token_ids == anew.token_ids
    assert second.logprobs == pytest.approx(anew.logprobs, abs=bench.tolerance)
