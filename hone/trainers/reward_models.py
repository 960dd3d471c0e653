"""Places the reward models that a run's reward components name: in this process, or each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hone.config import ConfigError
from hone.models.errors import ModelError
from hone.rewards.model import START_TIMEOUT_S, RewardModels, ServedRewardModel
from hone.rewards.pool import Hosting
from hone.rewards.settings import RewardComponent, RewardConfig, RewardModelConfig
from hone.trainers.scoring import AnswerScorer, reward_model_spec
from hone.workers.handles import TrainHandle
from hone.workers.train import TrainSpec

PROCESS = "hone.trainers.scoring_process"
PlaceRole = Callable[[str, TrainSpec], TrainHandle]


def place_reward_models(config: RewardConfig, vocabulary: str, place_role: PlaceRole) -> RewardModels:
    """The reward models of the components, those of processes not started yet.

    `vocabulary` is the digest of the policy's. Raises ConfigError naming the component whose model cannot be used.
    """
    served: dict[str, ServedRewardModel] = {}
    colocated: dict[str, AnswerScorer] = {}
    for name, part in config.components.items():
        if part.model is None:
            continue
        try:
            if part.model.place == "process":
                reward_model_spec(part.model)  # what is wrong with the folder is said at once
                served[name] = ServedRewardModel(_hosting(name, part, part.model, vocabulary))
            else:
                handle = place_role(f"reward model {name}", reward_model_spec(part.model))
                colocated[name] = AnswerScorer(part.model, vocabulary, handle.infer_batch)
        except (ConfigError, ModelError) as error:
            raise ConfigError(f"reward.components.{name}.model: {error}") from error
    return RewardModels(served, colocated)


def _hosting(name: str, part: RewardComponent, model: RewardModelConfig, vocabulary: str) -> Hosting:
    told: dict[str, Any] = {
        "path": model.path,
        "max_tokens_per_batch": model.max_tokens_per_batch,
        "compute_dtype": model.compute_dtype,
        "aggregation": model.aggregation,
    }
    if model.aggregation is not None:
        told["step_separator"] = model.step_separator
    return Hosting(
        components={name: {"model": told, "vocabulary": vocabulary, "timeout_s": part.timeout_s}},
        workers=1,
        module=PROCESS,
        environment=model.environment,
        start_timeout_s=START_TIMEOUT_S,
        budget=model.max_tokens_per_batch,
    )
