"""The server that all tests of this folder share."""

import pytest


@pytest.fixture(scope="session")
def models(tiny):
    return tiny("qwen3_wide", seed=0), tiny("qwen3_wide", seed=1)


@pytest.fixture
def plain(ready, models):
    """The plain server with the first model's weights as version 0."""
    return ready("vllm", models[0])
