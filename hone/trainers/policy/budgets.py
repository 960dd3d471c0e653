"""Token limits of the models of a policy run, and the check that prompts with their answers fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hone.config import ConfigError
from hone.engines.settings import EngineConfig
from hone.rollout.settings import RolloutConfig
from hone.trainers.policy.settings import PolicyRunConfig
from hone.types import Prompt
from hone.workers.rollout import CONTEXT_OPTIONS


class TokenBudgets:
    """The most tokens that each model reads at once, against a prompt with the longest answer."""

    def __init__(self, config: PolicyRunConfig) -> None:
        self._response = config.rollout.sampling.max_response_tokens
        builtin = config.rollout.backend == "builtin"
        self._longest = config.rollout.builtin.max_sequence_tokens if builtin else None
        engines = engines_of(config).items()
        scorers = {f"reward.components.{name}.model": one.model for name, one in config.reward.components.items()}
        budgets = {f"{key}.max_tokens_per_microbatch": one.token_limit for key, one in engines}
        budgets |= {f"{key}.max_tokens_per_batch": one.max_tokens_per_batch for key, one in scorers.items() if one}
        budgets |= _limits_of_served_teachers(config)
        self._key, self.longest = min(budgets.items(), key=lambda pair: pair[1])

    def check(self, prompt: int, what: str) -> None:
        """Raise ConfigError if a prompt of so many tokens does not fit the smallest budget; `what` names the prompt."""
        total = min(prompt + self._response, self._longest or prompt + self._response)
        if total > self.longest:
            raise ConfigError(
                f"{self._key} = {self.longest} is less than the longest sequence of {total} tokens: {what} + "
                f"rollout.sampling.max_response_tokens ({self._response}); raise the budget, or lower one of the limits"
            )

    def check_conversations(self, most: int | None) -> None:
        """Raise ConfigError if the run file allows conversations of more tokens; without a limit they end earlier."""
        if most is not None and most > self.longest:
            raise ConfigError(
                f"{self._key} = {self.longest} is less than episode.env.max_episode_tokens ({most}); raise the budget, "
                "or lower the limit"
            )

    def check_drawn(self, prompts: Sequence[Prompt]) -> None:
        """The same for prompts that were drawn: sets without max_prompt_tokens show their lengths only then."""
        for one in prompts:
            tokens = len(one.token_ids)
            self.check(tokens, f"prompt {one.prompt_id} ({tokens} tokens; see max_prompt_tokens of its data set)")


def engines_of(config: PolicyRunConfig) -> dict[str, EngineConfig]:
    """The engines that read whole sequences, by their key; the reference computes as the actor does."""
    engines = {"actor": config.actor}
    if config.critic is not None:
        engines["critic.engine"] = config.critic.engine
    if config.process_reward is not None:
        engines["process_reward.engine"] = config.process_reward.engine
    teachers = config.distillation.teachers if config.distillation is not None else {}
    placed = {name: one.engine for name, one in teachers.items() if one.served_by == "engine"}
    return engines | {f"distillation.teachers.{name}.engine": one for name, one in placed.items() if one is not None}


def _limits_of_served_teachers(config: PolicyRunConfig) -> dict[str, int]:
    """The longest sequence that the rollout engine of each teacher scores, by its key, where the run file sets one."""
    found: dict[str, int] = {}
    teachers = config.distillation.teachers if config.distillation is not None else {}
    for name, one in teachers.items():
        if one.served_by != "rollout":
            continue
        key = "rollout" if one.rollout is None else f"distillation.teachers.{name}.rollout"
        rollout = one.rollout or RolloutConfig(builtin=config.rollout.builtin)
        if rollout.backend == "builtin":
            limits = {"builtin.max_sequence_tokens": rollout.builtin.max_sequence_tokens}
        else:  # a server samples a token after the sequence, too
            limits = {f"engine.{option}": _whole(rollout.engine.get(option)) for option in CONTEXT_OPTIONS}
        found |= {f"{key}.{option}": most for option, most in limits.items() if most is not None}
    return found


def _whole(value: Any) -> int | None:
    return value - 1 if isinstance(value, int) and value > 1 else None
