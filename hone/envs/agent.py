"""Agent programs: an async function that knows a URL, a key and a prompt, and asks whatever it likes, as often as it
likes.

    async def solve(base_url: str, api_key: str, prompt: Prompt) -> str | None:
        client = AsyncOpenAI(base_url=base_url, api_key=api_key)
        reply = await client.chat.completions.create(model="policy", messages=list(prompt.messages))

Here the roles are turned round: not the episode loop asks the environment, the program asks the policy. Text that it
returns is what the rewards judge; without it they judge what the policy wrote. An exception means that the episode
failed, never a reward of 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable
from typing import Any, Protocol

from hone.config import ConfigError
from hone.registry import resolve
from hone.types import Prompt


class AgentProgram(Protocol):
    """One episode of an agent."""

    def __call__(self, base_url: str, api_key: str, prompt: Prompt) -> Awaitable[str | None]: ...


def load_program(reference: str) -> AgentProgram:
    """The function that a run file names. Raises ConfigError if there is none, or if it is not async."""
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


__all__ = ["AgentProgram", "load_program"]
