"""Settings of rewards: named components. Each is a function or a reward model, with a weight and a deadline."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator, model_validator

from hone.config import Config, setting
from hone.registry import unknown
from hone.rewards import REWARDS

ENVIRONMENT = "environment"  # the component of the rewards that an environment gives for turns


class RewardModelConfig(Config):
    """A reward model: a value model with its head and tokenizer, as `hone reward-model` exports it."""

    path: str = setting(meaning="folder of the reward model")
    place: Literal["colocated", "process"] = setting(
        "colocated", "in the trainer, which scores whole batches; or its own process, which scores during generation"
    )
    max_tokens_per_batch: int = setting(16384, "hard cap per forward; a longer answer fails", unit="tokens", ge=1)
    compute_dtype: Literal["auto", "bfloat16", "float32", "float64"] = setting(
        "auto", "dtype of weights and forward; auto: bfloat16 where the device multiplies it natively, else float32"
    )
    context: int | None = setting(None, "longest answer with its prompt, as model.use.context", unit="tokens", ge=1)
    aggregation: Literal["last", "mean", "min"] | None = setting(
        None, "process reward model: how the scores of the steps are combined; null: one score for the whole answer"
    )
    step_separator: str = setting("\n", "process reward model: the text between two steps", min_length=1)
    environment: dict[str, str] = setting(factory=dict, meaning="environment variables of the process, such as HF_HOME")

    @model_validator(mode="after")
    def _environment_is_a_process_s(self) -> RewardModelConfig:
        if self.environment and self.place != "process":
            raise ValueError("environment needs a process of its own: set place: process, or remove environment")
        return self


class RewardComponent(Config):
    """One reward and its weight: exactly one of `reward` (a function) and `model`."""

    reward: str | None = setting(None, "a registered reward, 'package.module:function' or 'path/to/file.py:function'")
    model: RewardModelConfig | None = setting(None, "a reward model that scores the answer's tokens")
    weight: float = setting(1.0, "factor of the value in the reward; 0: only logged")
    timeout_s: float = setting(30.0, "deadline of one call; a late call is a failure, not a 0", unit="s", gt=0)
    max_calls_per_step: int | None = setting(
        None, "calls of the function in one step, or one evaluation set; further answers are failures", ge=1
    )
    options: dict[str, Any] = setting(meaning="keyword arguments of the function", factory=dict)

    @model_validator(mode="after")
    def _one_kind(self) -> RewardComponent:
        if (self.reward is None) == (self.model is None):
            found = "neither" if self.reward is None else "both"
            raise ValueError(f"exactly one of reward and model should be set, found {found}")
        if self.model is not None and self.options:
            raise ValueError("options are arguments of a function; write the settings of a reward model under model")
        if self.model is not None and self.max_calls_per_step is not None:
            raise ValueError("max_calls_per_step limits the calls of a function; remove it from a reward model")
        return self

    @field_validator("reward")
    @classmethod
    def _exists(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if ":" not in value and value not in REWARDS:
            raise ValueError(f"{unknown('reward', value, list(REWARDS))}, or 'module:function', or 'file.py:function'")
        return value


class RewardConfig(Config):
    """The reward of a trajectory: the weighted sum of its components."""

    components: dict[str, RewardComponent] = setting(
        meaning="component name -> function or reward model; {} if the environment gives the rewards"
    )
    workers: int = setting(2, "processes that run the reward functions", ge=1)
    max_failed_fraction: float = setting(
        0.2, "a run ends if in each of three steps in a row more of the answers could not be scored", ge=0, le=1
    )

    @field_validator("components")
    @classmethod
    def _plain_names(cls, value: dict[str, RewardComponent]) -> dict[str, RewardComponent]:
        for name in value:
            if not name or "/" in name:
                raise ValueError(
                    f"component name {name!r} should not be empty or contain '/', which separates sub-components"
                )
        if ENVIRONMENT in value:
            raise ValueError(
                f"component name {ENVIRONMENT!r} is reserved for the rewards of turns; choose another name"
            )
        return value
