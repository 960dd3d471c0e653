"""The contract of an environment: one object per episode, asked to start, then to answer each completion.

An environment never sees a model: it is handed completions as text and token ids, and answers with messages. The
episode loop (`hone.envs.episode`) owns the tokens, which are append-only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from hone.types import Completion, Message, Prompt, Status


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an environment says to one completion: more messages to read, or that the episode is over."""

    done: bool
    messages: tuple[Message, ...] = ()  # appended after the completion, rendered without re-encoding it
    status: Status = Status.OK  # ENV_FAILED: a tool or sandbox broke; the trajectory is then not trained on
    error: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)


class Env(Protocol):
    """One episode, used once. An exception raised by either method is an environment failure, never a reward of 0."""

    async def start(self) -> tuple[int, ...]:
        """The first observation as token ids: the rendered prompt."""

    async def step(self, completion: Completion, text: str) -> StepResult:
        """Answer one completion, whose decoded text is given beside its ids."""

    async def close(self) -> None:
        """Release what the episode held (sandbox, connections); called exactly once, also after a failure."""


class EnvFactory(Protocol):
    """Makes the environment of one sample of one prompt."""

    def __call__(self, prompt: Prompt, sample: int) -> Env: ...
