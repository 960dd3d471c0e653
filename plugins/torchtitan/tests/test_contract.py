"""The engine by the contract of training engines."""

import pytest

from hone.testing import TrainingEngineContract

pytest.importorskip("torchtitan")


class TestTorchtitan(TrainingEngineContract):
    backend, device = "torchtitan", "cpu"
    model = {"options": {"head_dim": 16}}  # noqa: RUF012
