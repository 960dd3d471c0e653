"""docs/algorithms.md names every registered part. Its examples run in tests/docs."""

from pathlib import Path

from hone import algorithms
from hone.algorithms.presets import PRESETS

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")


def test_every_name_is_on_the_page():
    names = set(PRESETS).union(*(getattr(algorithms, registry) for registry in algorithms.__all__))
    assert not [name for name in sorted(names) if f"`{name}`" not in PAGE]
