"""Tiny models, the real server and what is asked of it: as for hone's own server adapters."""

from tests.rollout.conftest import (  # noqa: F401  fixtures
    forward,
    gap,
    real_adapter,
    real_python,
    real_server,
    runner,
    tiny,
    tokenizer,
)
from tests.rollout.servers.conftest import finish, push, ready, sample  # noqa: F401  fixtures
from tests.rollout.servers.test_adapters import base, named, server  # noqa: F401  fixtures of a server with adapters
from tests.rollout.servers.test_options import adapter_of  # noqa: F401  a fixture
from tests.rollout.servers.test_server_scores import unstarted  # noqa: F401  a fixture
from tests.rollout.servers.test_token import sglang  # noqa: F401  a fixture
