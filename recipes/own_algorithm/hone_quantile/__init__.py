"""Adds the advantage estimator `quantile` and the policy loss `damped` to hone. Imports no torch."""

from hone.algorithms import ADVANTAGES, POLICY_LOSSES
from hone.algorithms.settings import AdvantageSettings, PolicyLossSettings
from hone.config import setting

PLUGIN_API = 1  # the version of hone.PLUGIN_API that this package was written for


class QuantileSettings(AdvantageSettings):
    """Reward against a quantile of the group."""

    name: str = "quantile"
    level: float = setting(0.5, "which quantile is the baseline; 0.5: the median", ge=0, le=1)


class DampedSettings(PolicyLossSettings):
    """Policy gradient that learns less from failures than from successes."""

    name: str = "damped"
    damping: float = setting(0.5, "factor of the loss where the advantage is negative", ge=0, le=1)


def register() -> None:
    """Add both parts to hone's registries."""
    ADVANTAGES.register("quantile", "hone_quantile.mathematics:quantile", QuantileSettings)
    POLICY_LOSSES.register("damped", "hone_quantile.mathematics:damped", DampedSettings)
