"""Two servers for all tests of this folder: one plain, and one that spreads its model over two processes, with LoRA."""

import asyncio

import pytest

from hone.types import SamplingParams


@pytest.fixture(scope="session")
def models(tiny):
    return tiny("qwen3_wide", seed=0), tiny("qwen3_wide", seed=1)


@pytest.fixture
def plain(ready, models):
    """The plain server with the first model's weights as version 0."""
    return ready("vllm", models[0])


@pytest.fixture(scope="session")
def _pair(real_adapter, runner):
    server = real_adapter("vllm", 1, engine={"enable_lora": True, "max_lora_rank": 8}, tensor_parallel=2)
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
