"""Paths of SGLang that hone does not use. Who gets an answer at all: tests/rollout/servers/test_token.py."""

import pytest

from tests.rollout.servers.test_token import SGLANG_OPEN, UNPICKLING


@pytest.mark.sglang
def test_paths_of_sglang_that_hone_does_not_use_are_closed_with_the_token_too(sglang, finish):
    """Some of them unpickle what they are sent."""
    headers = {"Authorization": f"Bearer {sglang.server._spec.token}"}
    shut = [path for path in sglang.paths if path not in SGLANG_OPEN]
    assert set(shut) >= UNPICKLING
    assert set(finish(sglang.knock(shut, headers)).values()) == {404}
