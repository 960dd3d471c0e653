"""The mesh of a model, as forecasts count it."""

from hone.platforms.layout import Layout
from hone_torchtitan.settings import TitanParallel, TitanSettings


def test_a_forecast_counts_every_dimension():
    settings = TitanSettings(parallel=TitanParallel(replicate=2, tensor=2, sequence=True))
    assert settings.layout(8) == Layout(replicate=2, shard=2, tensor=2, between=True)
    assert TitanSettings().layout(8) == Layout(shard=8)
