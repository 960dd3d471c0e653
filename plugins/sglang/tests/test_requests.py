"""What SGLang's requests need beside the contract."""

import asyncio

import pytest

from hone.types import GenerationRequest, SamplingParams
from hone_sglang.server import _generate_body

pytestmark = pytest.mark.sglang


@pytest.fixture
def server(ready, tiny):
    """The server with the first model's weights."""
    return ready("sglang", tiny("qwen3"))


def test_a_caller_that_goes_away_ends_its_own_request_and_no_other(server, finish):
    """Identifiers that begin alike are told apart, though SGLang aborts by beginnings."""

    async def story():
        wanted = SamplingParams(max_tokens=60, ignore_eos=True)
        gone, stays = (
            asyncio.create_task(server.generate(GenerationRequest(name, (9,), wanted))) for name in ("a", "ab")
        )
        await asyncio.sleep(0.05)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        again = await server.generate(GenerationRequest("a", (9,), SamplingParams(max_tokens=2, ignore_eos=True)))
        return again, await stays

    again, stayed = finish(story())
    assert (len(again.token_ids), len(stayed.token_ids)) == (2, 60)


def test_requests_that_wait_for_a_pause_to_end_can_be_aborted(server, finish):
    async def story():
        await server.pause()
        waiting = asyncio.create_task(server.generate(GenerationRequest("waits", (9,), SamplingParams(max_tokens=2))))
        await asyncio.sleep(0.05)
        await server.abort_all()
        found = await waiting
        await server.resume()
        return found

    assert finish(story()).token_ids == ()


def test_an_aborted_request_keeps_its_tokens_while_the_server_is_paused(server, finish):
    async def story():
        running = asyncio.create_task(
            server.generate(GenerationRequest("r", (9,), SamplingParams(max_tokens=100, ignore_eos=True, seed=3)))
        )
        await asyncio.sleep(0.05)  # a few of the 100 tokens, also where each takes 2 ms
        await server.pause()
        await server.abort_all()
        cut = await running
        await server.resume()
        return cut, await server.generate(
            GenerationRequest("r", (9,), SamplingParams(max_tokens=100, ignore_eos=True, seed=3))
        )

    cut, whole = finish(story())
    assert 0 < len(cut.token_ids) < 100
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]


def test_an_adapter_is_refused_where_there_is_no_room_for_one(server, finish):
    offer = {"version": 3, "timeout_s": 5.0, "payload": {"kind": "adapter", "name": "x", "config": {}}}
    with pytest.raises(RuntimeError, match="started without room for an adapter"):
        finish(server.receive_weights(offer))
    assert server.weight_version == 0


def test_filters_ask_for_logprobs_of_what_they_leave():
    plain = _generate_body("r", (1, 2), SamplingParams(max_tokens=9, seed=2**63 + 5), 8)
    assert "return_sampling_mask" not in plain
    assert plain["sampling_params"]["max_new_tokens"] == 6
    assert plain["sampling_params"]["sampling_seed"] == 5
    assert plain["sampling_params"]["top_k"] == -1
    assert _generate_body("r", (1,), SamplingParams(max_tokens=1, top_p=0.9), 8)["return_sampling_mask"]
    greedy = _generate_body("r", (1,), SamplingParams(max_tokens=1, temperature=0.0, top_k=3), 8)
    assert "return_sampling_mask" not in greedy
