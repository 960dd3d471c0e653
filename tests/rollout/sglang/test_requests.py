"""What SGLang's requests need beside the contract."""

import asyncio

import pytest

from hone.types import SamplingParams
from hone.weights import TRANSPORTS
from hone.weights.sync import CheckpointEngineManager

pytestmark = pytest.mark.sglang


@pytest.fixture
def server(sglang_server, tiny, finish):
    """The server with the first model's weights."""

    async def push():
        await sglang_server.abort_all()
        await sglang_server.wake_up()
        await sglang_server.resume()
        sender = TRANSPORTS.get("ipc")(2**16, 60.0, sglang_server._spec.token)
        syncs = CheckpointEngineManager(sender)
        syncs.add_replica(sglang_server)
        try:
            await syncs.sync(list(tiny("qwen3").state_dict().items()), 0)
        finally:
            await sender.close()

    finish(push())
    return sglang_server


def test_a_caller_that_goes_away_ends_its_own_request_and_no_other(server, finish):
    """Identifiers that begin alike are told apart, though SGLang aborts by beginnings."""

    async def story():
        wanted = SamplingParams(max_tokens=60, ignore_eos=True)
        gone, stays = (asyncio.create_task(server.generate(name, (9,), wanted)) for name in ("a", "ab"))
        await asyncio.sleep(0.05)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        again = await server.generate("a", (9,), SamplingParams(max_tokens=2, ignore_eos=True))
        return again, await stays

    again, stayed = finish(story())
    assert (len(again.token_ids), len(stayed.token_ids)) == (2, 60)


def test_requests_that_wait_for_a_pause_to_end_can_be_aborted(server, finish):
    async def story():
        await server.pause()
        waiting = asyncio.create_task(server.generate("waits", (9,), SamplingParams(max_tokens=2)))
        await asyncio.sleep(0.05)
        await server.abort_all()
        found = await waiting
        await server.resume()
        return found

    assert finish(story()).token_ids == ()


def test_an_aborted_request_keeps_its_tokens_while_the_server_is_paused(server, finish):
    async def story():
        running = asyncio.create_task(
            server.generate("r", (9,), SamplingParams(max_tokens=100, ignore_eos=True, seed=3))
        )
        await asyncio.sleep(0.3)
        await server.pause()
        await server.abort_all()
        cut = await running
        await server.resume()
        return cut, await server.generate("r", (9,), SamplingParams(max_tokens=100, ignore_eos=True, seed=3))

    cut, whole = finish(story())
    assert 0 < len(cut.token_ids) < 100
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]


def test_an_adapter_is_refused(server, finish):
    offer = {"version": 3, "timeout_s": 5.0, "payload": {"kind": "adapter", "name": "x", "config": {}}}
    with pytest.raises(RuntimeError, match="SGLang takes whole weights"):
        finish(server.receive_weights(offer))
    assert server.weight_version == 0
