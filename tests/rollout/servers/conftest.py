"""What the tests of real engines in processes of their own share."""

import asyncio

import pytest

from hone.types import GenerationRequest, SamplingParams
from tests.rollout.syncing import sync_to


@pytest.fixture(scope="session")
def finish(runner):
    """`finish(coroutine)`: its result, on the loop that the servers are used from."""
    return lambda coroutine: runner.run(asyncio.wait_for(coroutine, 120))


@pytest.fixture(scope="session")
def push(finish):
    """`push(server, tensors, version, payload)`: a real sync through shared memory; the receipts."""
    return lambda server, tensors, version, payload=None: finish(sync_to(server, tensors, version, payload))


@pytest.fixture(scope="session")
def ready(real_server, push, finish):
    """`ready(backend, model)`: the shared server, awake, nothing running, with the model's weights as version 0."""

    def make(backend, model):
        server = real_server(backend)
        finish(server.abort_all())
        finish(server.wake_up())
        finish(server.resume())
        push(server, list(model.state_dict().items()), 0)
        server.metrics()
        return server

    return make


@pytest.fixture(scope="session")
def sample(finish):
    """`sample(server, prompts, **sampling)`: 16 tokens for each, all at once."""

    def run(server, prompts, **sampling):
        wanted = {"max_tokens": 16, "ignore_eos": True, **sampling}

        async def story():
            return await asyncio.gather(
                *(
                    server.generate(GenerationRequest(f"r{i}", prompt, SamplingParams(**{"seed": i, **wanted})))
                    for i, prompt in enumerate(prompts)
                )
            )

        return finish(story())

    return run
