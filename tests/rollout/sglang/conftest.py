"""What the tests of the real SGLang share."""

import asyncio

import pytest


@pytest.fixture(scope="session")
def finish(runner):
    """`finish(coroutine)`: its result, on the loop that the server is used from."""
    return lambda coroutine: runner.run(asyncio.wait_for(coroutine, 120))
