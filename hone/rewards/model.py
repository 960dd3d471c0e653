"""Reward models as a rubric sees them: answers in, scores out, wherever the model is.

    Rubric --Answer--> served: a process of its own, asked answer by answer and batched there (deadline, restart)
                   \\-> colocated: in this process, asked once for everything that was collected

This file knows no torch: a trainer places the models (`hone.trainers.reward_models`) and hands them to the rubric.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from hone.rewards.frames import encode_value
from hone.rewards.pool import Hosting, Outcome, RewardPool
from hone.types import Message, Prompt, Trajectory

START_TIMEOUT_S = 1800.0  # reading the weights of a large model from a slow disk


@dataclass(frozen=True, slots=True)
class Answer:
    """What a reward model scores: the tokens as they were sampled, and the text for one with another vocabulary."""

    token_ids: tuple[int, ...]  # prompt and response
    prompt_length: int
    messages: tuple[Message, ...]  # of the prompt
    response: str
    turns: int

    @classmethod
    def of(cls, prompt: Prompt, one: Trajectory) -> Answer:
        return cls(one.token_ids, one.prompt_length, prompt.messages, one.response, one.turns)

    def encode(self) -> str:
        """As JSON. Raises TypeError for messages that JSON cannot carry."""
        return encode_value([self.token_ids, self.prompt_length, self.messages, self.response, self.turns])

    @classmethod
    def decode(cls, item: Sequence[Any]) -> Answer:
        token_ids, prompt_length, messages, response, turns = item
        return cls(tuple(token_ids), prompt_length, tuple(messages), response, turns)


ScoreAnswers = Callable[[Sequence[Answer]], list[Outcome]]
"""Scores of answers, in order; what cannot be scored has an error and no value."""


class ServedRewardModel:
    """A reward model in a process of its own, which is given as many waiting answers at once as fit its forward."""

    def __init__(self, hosting: Hosting) -> None:
        """`hosting` has the model as its one component."""
        (self._name,) = hosting.components
        self._pool = RewardPool(hosting)

    def start(self) -> None:
        """Start the process and wait until it has loaded the model. Raises ConfigError if it cannot be loaded."""
        self._pool.start()

    def submit(self, answer: Answer) -> Future[Outcome]:
        """Ask for one score; raises TypeError for messages that cannot be sent. The future never waits without end."""
        return self._pool.submit_item(self._name, answer.encode(), len(answer.token_ids))

    def close(self) -> None:
        self._pool.close()

    @property
    def restarts(self) -> int:
        return self._pool.restarts


@dataclass(frozen=True, slots=True)
class RewardModels:
    """The reward models that a run's components name, by component, as the trainer placed them."""

    served: Mapping[str, ServedRewardModel] = field(default_factory=dict)
    colocated: Mapping[str, ScoreAnswers] = field(default_factory=dict)
