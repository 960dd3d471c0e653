"""Reward models for a rubric: it passes answers and gets scores, wherever the model runs.

    Rubric --Answer--> served: a separate process that gets answers one by one and batches them (deadline, restart)
                   \\-> colocated: in this process, called once with all collected answers

This file imports no torch. The trainer places the models (`hone.trainers.reward_models`) and passes them to the rubric.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from typing import Any

from hone.processes.frames import encode_value
from hone.rewards.hosting.processes import Hosting
from hone.rewards.pool import Outcome, RewardPool
from hone.types import Message, Prompt, Trajectory

START_TIMEOUT_S = 1800.0  # for reading the weights of a large model from a slow disk


@dataclass(frozen=True, slots=True)
class Answer:
    """Input of a reward model: the sampled tokens, and the text for a model with another vocabulary."""

    token_ids: tuple[int, ...]  # prompt and response
    prompt_length: int
    messages: tuple[Message, ...]  # the prompt's
    response: str
    turns: int
    tools: tuple[Mapping[str, Any], ...] = ()  # the prompt's

    @classmethod
    def of(cls, prompt: Prompt, one: Trajectory) -> Answer:
        return cls(one.token_ids, one.prompt_length, prompt.messages, one.response, one.turns, prompt.tools)

    def encode(self) -> str:
        """Encode as JSON. Raises TypeError for messages that are not JSON."""
        return encode_value([getattr(self, one.name) for one in fields(self)])

    @classmethod
    def decode(cls, item: Sequence[Any]) -> Answer:
        token_ids, prompt_length, messages, response, turns, tools = item
        return cls(tuple(token_ids), prompt_length, tuple(messages), response, turns, tuple(tools))


ScoreAnswers = Callable[[Sequence[Answer]], list[Outcome]]
"""Scores answers, in order; an answer that cannot be scored gets an error instead of a value."""


class ServedRewardModel:
    """A reward model in its own process, which scores as many waiting answers at once as fit one forward."""

    def __init__(self, hosting: Hosting) -> None:
        """`hosting` has one component: the model."""
        (self._name,) = hosting.components
        self._pool = RewardPool(hosting)

    def start(self) -> None:
        """Start the process and wait until it has loaded the model. Raises ConfigError if that fails."""
        self._pool.start()

    def submit(self, answer: Answer) -> Future[Outcome]:
        """Request one score. Raises TypeError for messages that cannot be sent. The future always resolves in time."""
        return self._pool.submit_item(self._name, answer.encode(), len(answer.token_ids))

    def close(self) -> None:
        self._pool.close()

    @property
    def restarts(self) -> int:
        return self._pool.restarts


@dataclass(frozen=True, slots=True)
class RewardModels:
    """The reward models of a run by component name, as the trainer placed them."""

    served: Mapping[str, ServedRewardModel] = field(default_factory=dict)
    colocated: Mapping[str, ScoreAnswers] = field(default_factory=dict)
