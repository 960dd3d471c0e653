"""Requests that cannot be served: one clear ValueError each, and the engine goes on."""

import asyncio

import pytest

from hone.types import GenerationRequest, PromptTooLong, SamplingParams


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ((), {}, "empty prompt"),
        ((9,) * 128, {}, "128 tokens"),
        ((9, 104), {}, "vocabulary of 104, found 104"),
        ((9, -1), {}, "vocabulary of 104, found -1"),
        ((9,), {"max_tokens": 0}, "max_tokens"),
        ((9,), {"temperature": -0.1}, "temperature"),
        ((9,), {"temperature": float("nan")}, "temperature"),
        ((9,), {"temperature": float("inf")}, "temperature"),
        ((9,), {"top_k": -1}, "top_k"),
        ((9,), {"top_p": 0.0}, "top_p"),
        ((9,), {"top_p": 1.5}, "top_p"),
        ((9,), {"min_p": -0.1}, "min_p"),
        ((9,), {"min_p": 1.1}, "min_p"),
        ((9,), {"stop": ("",)}, "stop"),
        ((9,), {"stop_token_ids": (200,)}, "stop_token_ids"),
    ],
)
def test_a_malformed_request_is_one_clear_error(bench, finish, prompt, sampling, message):
    async def story():
        good = asyncio.create_task(bench.all(bench.prompts(3)))
        with pytest.raises(ValueError, match=message) as caught:
            await bench.engine.generate(
                GenerationRequest("bad", prompt, SamplingParams(**{"max_tokens": 4, **sampling}))
            )
        assert "'bad'" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert isinstance(caught.value, PromptTooLong) == (len(prompt) == 128)
        assert len(await good) == 3

    finish(story())


def test_an_id_is_used_once_at_a_time(bench, finish):
    async def story():
        wanted = SamplingParams(max_tokens=4, ignore_eos=True)
        first = asyncio.create_task(bench.engine.generate(GenerationRequest("same", (9,), wanted)))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="'same' is already running"):
            await bench.engine.generate(GenerationRequest("same", (9,), wanted))
        await first
        return await bench.engine.generate(GenerationRequest("same", (9,), wanted))

    assert len(finish(story()).token_ids) == 4
