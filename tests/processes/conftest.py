"""An event loop that a test runs coroutines on."""

import asyncio

import pytest


@pytest.fixture
def finish():
    """finish(coroutine) -> its result."""
    with asyncio.Runner() as runner:
        yield runner.run
