"""Settings of rewards: named components, each a function with a weight and a deadline."""

from __future__ import annotations

from typing import Any

from pydantic import field_validator

from hone.config import Config, setting
from hone.registry import load_plugins, unknown
from hone.rewards import REWARDS


class RewardComponent(Config):
    """One reward function and what its value counts for."""

    reward: str = setting(meaning="a registered reward, 'package.module:function' or 'path/to/file.py:function'")
    weight: float = setting(1.0, "factor of the value in the reward; 0: measured and logged, not rewarded")
    timeout_s: float = setting(30.0, "deadline of one call; a later answer is a failure, not a 0", unit="s", gt=0)
    options: dict[str, Any] = setting(meaning="keyword arguments of the function", factory=dict)

    @field_validator("reward")
    @classmethod
    def _exists(cls, value: str) -> str:
        if ":" not in value and value not in REWARDS:
            load_plugins()
        if ":" not in value and value not in REWARDS:
            raise ValueError(f"{unknown('reward', value, list(REWARDS))}, or 'module:function', or 'file.py:function'")
        return value


class RewardConfig(Config):
    """The reward of a trajectory: the weighted sum of its components."""

    components: dict[str, RewardComponent] = setting(meaning="name of the component -> its function", min_length=1)
    workers: int = setting(2, "processes that run the reward functions", ge=1)

    @field_validator("components")
    @classmethod
    def _plain_names(cls, value: dict[str, RewardComponent]) -> dict[str, RewardComponent]:
        for name in value:
            if not name or "/" in name:
                raise ValueError(f"component name {name!r} should be non-empty and without '/' (for sub-components)")
        return value
