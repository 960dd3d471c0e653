"""Abort, pause, sleep, and weights that change, with requests running."""

import asyncio

import pytest

from hone.rollout.base import ScoreAborted
from hone.types import GenerationRequest, SamplingParams, StopReason
from hone.weights.base import WeightSyncError

MANY = 100  # enough that something can happen in between, whatever else the machine does
LONG = {"max_tokens": MANY}


async def during(bench, prompts, action, **sampling):
    """Start the prompts, let some tokens come, do something, and wait for the completions."""
    running = asyncio.create_task(bench.all(prompts, **{**LONG, **sampling}))
    await bench.let_some_come()
    await action()
    return await running


@pytest.mark.slow
def test_abort_gives_the_tokens_so_far_and_a_resend_continues_them(bench, finish):
    prompts = bench.prompts(5)
    how = {} if bench.positional_seed else {"temperature": 0.0}  # else other tokens come, of the same distribution
    whole = finish(bench.all(prompts, **LONG, **how))

    async def resend(i, partial):
        wanted = SamplingParams(max_tokens=MANY - len(partial), ignore_eos=True, seed=i, **how)
        return await bench.engine.generate(GenerationRequest(f"again{i}", (*prompts[i], *partial), wanted))

    cut = finish(during(bench, prompts, bench.engine.abort_all, **how))
    assert any(c.token_ids for c in cut)
    for i, completion in enumerate(cut):
        assert completion.stop_reason is StopReason.ABORTED
        assert completion.token_ids == whole[i].token_ids[: len(completion.token_ids)]
        assert len(completion.token_ids) == len(completion.logprobs) < MANY
        rest = finish(resend(i, completion.token_ids))
        assert completion.token_ids + rest.token_ids == whole[i].token_ids


def test_an_aborted_scoring_says_so_or_is_complete(bench, finish):
    """A server may abort it before it has read the prompt; a router asks again, so its caller does not see it."""
    prompt = bench.prompts(2)[1]

    async def story():
        scorings = [asyncio.create_task(bench.engine.score(f"s{i}", prompt)) for i in range(16)]
        await asyncio.sleep(0)
        await bench.engine.pause("abort")
        await bench.engine.resume()
        return await asyncio.gather(*scorings, return_exceptions=not bench.hides_aborts)

    for found in finish(story()):
        assert isinstance(found, ScoreAborted) or len(found.logprobs) == len(prompt)


def test_aborting_nothing_is_fine(bench, finish):
    finish(bench.engine.abort_all())
    assert len(finish(bench.all(bench.prompts(2)))) == 2


def test_no_token_comes_while_paused_and_none_is_lost(bench, finish):
    prompts = bench.prompts(5)
    whole = finish(bench.all(prompts, **LONG))

    async def pause_a_while():
        await bench.engine.pause()
        await bench.let_run(6)
        bench.engine.metrics()
        await bench.let_run(100)
        assert bench.engine.metrics()["rollout/tokens"].value == 0
        await bench.engine.resume()

    found = finish(during(bench, prompts, pause_a_while))
    assert [c.token_ids for c in found] == [c.token_ids for c in whole]


def test_a_request_that_comes_while_paused_waits(bench, finish):
    async def story():
        await bench.engine.pause()
        task = asyncio.create_task(bench.all(bench.prompts(2)))
        await bench.let_run(50)
        assert not task.done()
        await bench.engine.resume()
        return await task

    assert len(finish(story())) == 2


def test_a_pause_that_waits_lets_the_running_end_and_keeps_the_later_ones(bench, finish):
    prompts = bench.prompts(4)

    async def story():
        running = asyncio.create_task(bench.all(prompts[:3], tag="early", **LONG))
        await bench.let_some_come()
        pausing = asyncio.create_task(bench.engine.pause("wait"))
        await bench.let_run(1)
        later = asyncio.create_task(bench.all(prompts[3:], tag="late"))
        await pausing
        assert [len(c.token_ids) for c in await running] == [MANY] * 3
        await bench.let_run(20)
        assert not later.done()
        await bench.engine.resume()
        return await later

    assert len(finish(story())[0].token_ids) == 16


def test_a_pause_that_aborts_ends_requests_or_hides_that_it_did(bench, finish):
    """An engine gives back what it has; a router sends the rest again, and nobody above it sees a difference."""
    prompts = bench.prompts(5)
    whole = finish(bench.all(prompts, **LONG))

    async def pause_a_while():
        await bench.engine.pause("abort")
        await bench.let_run(20)
        await bench.engine.resume()

    for found, expected in zip(finish(during(bench, prompts, pause_a_while)), whole, strict=True):
        if bench.hides_aborts:
            assert found.token_ids == expected.token_ids
            assert found.stop_reason is StopReason.LENGTH
            assert found.request_id == expected.request_id
        else:
            assert found.stop_reason is StopReason.ABORTED
            assert found.token_ids == expected.token_ids[: len(found.token_ids)]


def test_an_update_in_flight_is_seen_by_the_very_next_token(bench, finish, gap, forward):
    """Tokens say which weights sampled them; those after the update are computed from KV of the new weights only."""
    prompts = bench.prompts(3)

    async def update():
        await bench.update(bench.weights(bench.other_model), 7)

    for prompt, completion in zip(prompts, finish(during(bench, prompts, update)), strict=True):
        versions = completion.weight_versions
        assert len(completion.token_ids) == len(versions) == MANY
        assert set(versions) == {0, 7}
        assert list(versions) == sorted(versions)
        switch = versions.index(7)
        assert gap(bench.other_model, prompt, completion, start=switch) < bench.tolerance
        logits = forward(bench.model, (*prompt, *completion.token_ids))[len(prompt) - 1 : -1].log_softmax(-1)
        for place in range(switch):
            assert abs(float(logits[place, completion.token_ids[place]]) - completion.logprobs[place]) < bench.tolerance


def test_an_update_reaches_prompts_that_were_seen_before(bench, finish, gap):
    """No cached prefix of older weights survives."""
    prompts = bench.prompts(4)
    finish(bench.all(prompts))
    finish(bench.update(bench.weights(bench.other_model), 1))
    assert bench.engine.weight_version == 1
    for prompt, completion in zip(prompts, finish(bench.all(prompts)), strict=True):
        assert set(completion.weight_versions) == {1}
        assert gap(bench.other_model, prompt, completion) < bench.tolerance


def test_the_receipt_proves_what_is_served(bench, finish):
    sent = bench.weights(bench.other_model)
    receipt = finish(bench.update(iter(reversed(sent)), 3))
    assert receipt.version == bench.engine.weight_version == 3
    assert receipt.digest == bench.digest(sent) != bench.digest(bench.weights(bench.model))
    assert receipt.tensors == len(sent)
    assert receipt.bytes == sum(tensor.numel() * 4 for _, tensor in sent)


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "twice"])
def test_a_bad_update_is_refused_by_name_and_stops_the_replica(bench, finish, fault):
    name = "model.layers.1.mlp.up_proj.weight"
    sent = dict(bench.weights(bench.other_model))
    stream = list(sent.items())
    if fault == "missing":
        stream = [(key, tensor) for key, tensor in stream if key != name]
    if fault == "unknown":
        name = "model.layers.7.mlp.up_proj.weight"
        stream.insert(3, (name, sent["model.norm.weight"]))
    if fault == "shape":
        stream = [(key, tensor[:-1] if key == name else tensor) for key, tensor in stream]
    if fault == "twice":
        stream.append((name, sent[name]))

    async def story():
        running = asyncio.create_task(bench.all(bench.prompts(3), tag="before", max_tokens=100))
        await bench.let_some_come()
        with pytest.raises((ValueError, WeightSyncError), match=name.replace(".", r"\.")):
            await bench.update(stream, 2)
        (ended,) = await asyncio.gather(running, return_exceptions=True)
        if not isinstance(ended, RuntimeError):  # they had ended before the fault showed: with the weights before
            assert all(version < 2 for one in ended for version in one.weight_versions)
        with pytest.raises(RuntimeError, match=r"update_weights|did not complete"):
            await bench.all(bench.prompts(1))
        await bench.update(sent.items(), 2)
        return await bench.all(bench.prompts(1))

    assert set(finish(story())[0].weight_versions) == {2}


def test_what_was_sent_is_copied(bench, finish, gap):
    """A trainer that goes on training must not change what the rollout serves."""
    sent = bench.weights(bench.other_model)
    finish(bench.update(((n, t) for n, t in sent), 1))
    before = finish(bench.all(bench.prompts(3)))
    for _, tensor in sent:
        tensor.data.zero_()
    assert [c.token_ids for c in finish(bench.all(bench.prompts(3)))] == [c.token_ids for c in before]


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake(bench, finish, gap, level):
    prompts = bench.prompts(4)

    async def story():
        await bench.all(prompts, tag="before")
        await bench.engine.sleep(level)
        with pytest.raises(RuntimeError, match="wake_up"):
            await bench.all(prompts[:1], tag="asleep")
        await bench.engine.wake_up(("weights",))
        if level == 2:
            assert bench.engine.weight_version == -1
            await bench.update(bench.weights(bench.other_model), 1)
        with pytest.raises(RuntimeError, match="wake_up"):
            await bench.all(prompts[:1], tag="half awake")
        await bench.engine.wake_up(("kv_cache",))
        return await bench.all(prompts, tag="after")

    model = bench.model if level == 1 else bench.other_model
    for prompt, completion in zip(prompts, finish(story()), strict=True):
        assert gap(model, prompt, completion) < bench.tolerance


def test_after_level_2_nothing_is_generated_before_weights_come(bench, finish):
    async def story():
        await bench.engine.sleep(2)
        await bench.engine.wake_up()
        with pytest.raises(RuntimeError, match="update_weights"):
            await bench.all(bench.prompts(1))

    finish(story())


def test_sleep_in_flight_loses_no_token(bench, finish):
    prompts = bench.prompts(5)
    whole = finish(bench.all(prompts, **LONG))

    async def nap():
        await bench.engine.sleep(1)
        await bench.let_run(20)
        await bench.engine.wake_up()

    found = finish(during(bench, prompts, nap))
    assert [c.token_ids for c in found] == [c.token_ids for c in whole]


def test_metrics_count_since_the_last_look(bench, finish):
    bench.engine.metrics()
    finish(bench.all(bench.prompts(5), max_tokens=4))
    found = bench.engine.metrics()
    assert found["rollout/tokens"].value == 20
    assert found["rollout/requests"].value == 5
    assert bench.engine.metrics()["rollout/tokens"].value == 0
