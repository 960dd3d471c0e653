"""Which sandboxes work on the machine of the tests: some containers have neither."""

import asyncio
import functools

import pytest

from hone.sandboxes.choice import examine


@functools.cache
def reason(backend: str) -> str:
    """Why a program cannot run in this sandbox here; empty if one did."""
    works, detail = asyncio.run(examine(backend))
    return "" if works else detail


def skip_without(backend: str) -> None:
    """Skip the test, with the reason, where the sandbox does not work."""
    if found := reason(backend):
        pytest.skip(found)
