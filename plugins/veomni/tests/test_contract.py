"""The engine by the contract of training engines."""

import pytest

from hone.testing import TrainingEngineContract

pytest.importorskip("veomni")


class TestVeomni(TrainingEngineContract):
    backend, device = "veomni", "cpu"
    model = {"options": {"head_dim": 16}}  # noqa: RUF012
