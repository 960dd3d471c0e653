"""The built-in engine by the suites of plug-ins, in this process and as a server; `contract/` has what goes beyond."""

import pytest

from hone.rollout import ROLLOUT_ENGINES
from hone.rollout.builtin.engine import BuiltinEngine
from hone.rollout.settings import BuiltinSettings
from hone.testing import RolloutEngineContract, RolloutServerContract
from tests.rollout.conftest import REAL, ROOT
from tests.rollout.contract.conftest import SlowRemote


class TestBuiltin(RolloutEngineContract):
    def make(self, model, tokenizer):
        return BuiltinEngine(BuiltinSettings(), model, tokenizer)


@pytest.mark.slow
class TestBuiltinServer(RolloutServerContract):
    """4 ms slower per token, so that something can happen meanwhile."""

    options = {"start_timeout_s": 120}  # noqa: RUF012
    long_tokens = 100

    def make(self, spec):
        return SlowRemote(spec)


class OfAnotherProject(RolloutServerContract):
    backend = ""

    def setup_method(self):
        real, python = REAL[self.backend], ROOT / f".venv-{self.backend}" / "bin" / "python"
        if not python.is_file():
            pytest.skip(f"there is no .venv-{self.backend}: make test-{self.backend}")
        own = {"python": str(python), "start_timeout_s": real.start_timeout_s}
        type(self).options = {"backend": self.backend, "engine": real.small, **own}
        super().setup_method()

    def make(self, spec):
        return ROLLOUT_ENGINES.get(self.backend)(spec)


@pytest.mark.vllm
class TestVllm(OfAnotherProject):
    backend, deadline_s, seeds_positions = "vllm", 300.0, False
    model = {"options": {"head_dim": 32}}  # noqa: RUF012  vLLM's smallest on a CPU


@pytest.mark.sglang
class TestSglang(OfAnotherProject):
    backend, deadline_s = "sglang", 420.0
