"""Receivers in processes of their own, as for hone's transports."""

from tests.weights.conftest import replicas  # noqa: F401  a fixture
