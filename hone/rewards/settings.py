"""Settings of rewards: named components, each a function or a reward model with a weight and a deadline."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator, model_validator

from hone.config import Config, setting
from hone.registry import load_plugins, unknown
from hone.rewards import REWARDS


class RewardModelConfig(Config):
    """A reward model: a value model with its head and tokenizer, as `hone reward-model` exports it."""

    path: str = setting(meaning="folder of the value model")
    place: Literal["colocated", "process"] = setting(
        "colocated", "in the trainer, asked for each collected batch at once; or a process of its own, asked meanwhile"
    )
    max_tokens_per_batch: int = setting(16384, "hard cap of one forward; longer answers fail", unit="tokens", ge=1)
    compute_dtype: Literal["bfloat16", "float32", "float64"] = setting("bfloat16", "of its weights and its forward")
    aggregation: Literal["last", "mean", "min"] | None = setting(
        None, "process reward model: how the scores of the steps become one; null: one score for the whole answer"
    )
    step_separator: str = setting("\n", "process reward model: what stands between two steps", min_length=1)
    environment: dict[str, str] = setting(
        factory=dict, meaning="variables of the process, such as CUDA_VISIBLE_DEVICES"
    )

    @model_validator(mode="after")
    def _environment_is_a_process_s(self) -> RewardModelConfig:
        if self.environment and self.place != "process":
            raise ValueError("environment is that of a process of its own: set place: process, or remove it")
        return self


class RewardComponent(Config):
    """One reward and what its value counts for: exactly one of `reward` (a function) and `model`."""

    reward: str | None = setting(None, "a registered reward, 'package.module:function' or 'path/to/file.py:function'")
    model: RewardModelConfig | None = setting(None, "a reward model that scores the answer's tokens")
    weight: float = setting(1.0, "factor of the value in the reward; 0: measured and logged, not rewarded")
    timeout_s: float = setting(30.0, "deadline of one call; a later answer is a failure, not a 0", unit="s", gt=0)
    options: dict[str, Any] = setting(meaning="keyword arguments of the function", factory=dict)

    @model_validator(mode="after")
    def _one_kind(self) -> RewardComponent:
        if (self.reward is None) == (self.model is None):
            found = "neither" if self.reward is None else "both"
            raise ValueError(f"exactly one of reward and model should be set, found {found}")
        if self.model is not None and self.options:
            raise ValueError("options are arguments of a function; the settings of a reward model stand under model")
        return self

    @field_validator("reward")
    @classmethod
    def _exists(cls, value: str | None) -> str | None:
        if value is None:
            return None
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
