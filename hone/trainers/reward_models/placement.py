"""Places the reward models that a run's reward components name: in this process, or each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hone.config import ConfigError
from hone.models.errors import ModelError
from hone.rewards.hosting.processes import Hosting
from hone.rewards.model import START_TIMEOUT_S, RewardModels, ServedRewardModel
from hone.rewards.settings import RewardComponent, RewardConfig, RewardModelConfig
from hone.trainers.reward_models.scorer import AnswerScorer, reward_model_spec
from hone.workers.train import TrainHandle, TrainSpec

PROCESS = "hone.trainers.reward_models.process"
PlaceRole = Callable[[str, TrainSpec], TrainHandle]


def place_reward_models(
    config: RewardConfig, vocabulary: str, place_role: PlaceRole, logs: Path | None = None
) -> RewardModels:
    """The reward models of the components, with processes that are not started yet.

    `vocabulary` is the digest of the policy's. Raises ConfigError naming the component whose model cannot be used.
    """
    served: dict[str, ServedRewardModel] = {}
    colocated: dict[str, AnswerScorer] = {}
    for name, part in config.components.items():
        if part.model is None:
            continue
        try:
            if part.model.place == "process":
                reward_model_spec(part.model)  # raises now for a folder that cannot be used
                served[name] = ServedRewardModel(
                    replace(_hosting(name, part, part.model, vocabulary), log=logs and logs / name)
                )
            else:
                handle = place_role(f"reward model {name}", reward_model_spec(part.model))
                colocated[name] = AnswerScorer(part.model, vocabulary, handle)
        except (ConfigError, ModelError) as error:
            raise ConfigError(f"reward.components.{name}.model: {error}") from error
    return RewardModels(served, colocated)


def _hosting(name: str, part: RewardComponent, model: RewardModelConfig, vocabulary: str) -> Hosting:
    options: dict[str, Any] = {
        "path": model.path,
        "max_tokens_per_batch": model.max_tokens_per_batch,
        "compute_dtype": model.compute_dtype,
        "context": model.context,
        "aggregation": model.aggregation,
    }
    if model.aggregation is not None:
        options["step_separator"] = model.step_separator
    return Hosting(
        components={name: {"model": options, "vocabulary": vocabulary, "timeout_s": part.timeout_s}},
        workers=1,
        module=PROCESS,
        environment=model.environment,
        start_timeout_s=START_TIMEOUT_S,
        budget=model.max_tokens_per_batch,
    )
