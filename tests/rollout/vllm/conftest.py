"""Two servers for all tests of this folder: one plain, and one that spreads its model over two processes, with LoRA."""

import asyncio

import pytest

from hone.types import SamplingParams
from hone.weights import TRANSPORTS
from hone.weights.base import Full
from hone.weights.sync import CheckpointEngineManager


@pytest.fixture(scope="session")
def finish(runner):
    """`finish(coroutine)`: its result, on the loop that the servers are used from."""
    return lambda coroutine: runner.run(asyncio.wait_for(coroutine, 120))


class _Noting:
    """A replica whose receipts are kept."""

    def __init__(self, engine):
        self._engine = engine
        self.receipts = []

    def __getattr__(self, name):
        return getattr(self._engine, name)

    async def receive_weights(self, offer):
        self.receipts = await self._engine.receive_weights(offer)
        return self.receipts


@pytest.fixture(scope="session")
def push(finish):
    """`push(server, tensors, version, payload)`: a real sync through shared memory; the receipts."""

    def run(server, tensors, version, payload=None):
        async def story():
            sender = TRANSPORTS.get("ipc")(2**16, 60.0, server._spec.token)
            noting = _Noting(server)
            syncs = CheckpointEngineManager(sender)
            syncs.add_replica(noting)
            try:
                await syncs.sync(tensors, version, payload or Full())
            finally:
                await sender.close()
            return noting.receipts

        return finish(story())

    return run


@pytest.fixture(scope="session")
def models(tiny):
    return tiny("qwen3_wide", seed=0), tiny("qwen3_wide", seed=1)


@pytest.fixture
def plain(vllm_server, push, models, finish):
    """The plain server with the first model's weights as version 0."""
    finish(vllm_server.wake_up())
    finish(vllm_server.resume())
    push(vllm_server, list(models[0].state_dict().items()), 0)
    vllm_server.metrics()
    return vllm_server


@pytest.fixture(scope="session")
def _pair(vllm_adapter, runner):
    server = vllm_adapter(1, engine={"enable_lora": True, "max_lora_rank": 8}, tensor_parallel=2)
    runner.run(server.start())
    yield server
    runner.run(server.close())


@pytest.fixture
def pair(_pair, push, models):
    """A server of two processes (tensor parallel) with the first model's weights as version 0."""
    push(_pair, list(models[0].state_dict().items()), 0)
    return _pair


@pytest.fixture(scope="session")
def sample(finish):
    """`sample(server, prompts, **sampling)`: 16 tokens for each, all at once."""

    def run(server, prompts, **sampling):
        wanted = {"max_tokens": 16, "ignore_eos": True, **sampling}

        async def story():
            return await asyncio.gather(
                *(
                    server.generate(f"r{i}", prompt, SamplingParams(**{"seed": i, **wanted}))
                    for i, prompt in enumerate(prompts)
                )
            )

        return finish(story())

    return run
