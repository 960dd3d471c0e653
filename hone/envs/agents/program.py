"""Agent programs: async functions that get a URL, a key and a prompt, and call the policy as often as they like.

    async def solve(base_url: str, api_key: str, prompt: Prompt) -> str | Verdict | None:
        client = AsyncOpenAI(base_url=base_url, api_key=api_key)
        reply = await client.chat.completions.create(model="policy", messages=list(prompt.messages))

The program calls the policy; no environment is involved. The rewards judge the text that it returns, or the policy's
output if it returns none; a `Verdict` may also have a reward. An exception means that the episode failed, which is not
a reward of 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from hone.config import ConfigError
from hone.registry import resolve
from hone.types import Prompt


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a program says of its episode. Verdict("42", reward=1.0, metrics={"files_changed": 3.0})"""

    answer: str | None = None  # what the rewards judge; None: everything that the policy wrote
    reward: float | None = None  # of the episode, added to those of `reward.components`; None: no reward of its own
    metrics: Mapping[str, float] = field(default_factory=dict)  # recorded as the mean of rollout/<name>


class AgentProgram(Protocol):
    """One episode of an agent."""

    def __call__(self, base_url: str, api_key: str, prompt: Prompt) -> Awaitable[str | Verdict | None]: ...


def load_program(reference: str) -> AgentProgram:
    """Load the function that a run file names. Raises ConfigError if it does not exist or is not async."""
    try:
        program: Any = resolve(reference)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"episode.env.program: {error}") from error
    called = program if inspect.isroutine(program) else getattr(program, "__call__", None)  # noqa: B004
    if not inspect.iscoroutinefunction(called):
        raise ConfigError(
            f"episode.env.program: {reference} should be an async function (base_url, api_key, prompt); one that "
            "blocks would hold up every other episode"
        )
    found: AgentProgram = program
    return found


__all__ = ["AgentProgram", "Verdict", "load_program"]
