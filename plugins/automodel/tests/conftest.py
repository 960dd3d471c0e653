"""Models in folders, of the contract suite."""

from tests.engines.contract.conftest import folders  # noqa: F401  a fixture
