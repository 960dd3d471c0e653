"""`fsdp2` by the contract of training engines, and on the dense models of the tests of meshes."""

import pytest

from hone.testing import TrainingEngineContract
from tests.engines.contract.cases import MODELS


class TestFsdp2(TrainingEngineContract):
    backend, device = "fsdp2", "cpu"
    model = {"options": {"head_dim": 16}}  # noqa: RUF012


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"qwen3"}))
def test_other_architectures_score_as_transformers_does(name):
    class Suite(TestFsdp2):
        model = {"architecture": name, **MODELS[name]}  # noqa: RUF012

    Suite.perform("test_log_probs_are_those_of_transformers", {})
    Suite.teardown_class()
