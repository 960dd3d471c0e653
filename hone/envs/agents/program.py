"""Agent programs: async functions that get a URL, a key and a prompt, and call the policy as often as they like.

    async def solve(base_url: str, api_key: str, prompt: Prompt) -> str | None:
        client = AsyncOpenAI(base_url=base_url, api_key=api_key)
        reply = await client.chat.completions.create(model="policy", messages=list(prompt.messages))

The program calls the policy; no environment is involved. The rewards judge the text that it returns, or the policy's
output if it returns none. An exception means that the episode failed, which is not a reward of 0.
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


__all__ = ["AgentProgram", "load_program"]
