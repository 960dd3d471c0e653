"""Shared parts of environments with actions as text: the seed, the first message, unreadable answers."""

from __future__ import annotations

import zlib

from hone.envs.base import StepResult
from hone.types import Message, Prompt, Status


def seed_of(prompt: Prompt) -> int:
    """The seed of an episode: the column `seed` of its row, or else a number made from the prompt's name.

    All samples of a prompt have the same.
    """
    return int(prompt.row.get("seed", zlib.crc32(prompt.prompt_id.encode())))


def opening(prompt: Prompt, observation: str) -> tuple[Message, ...]:
    """The messages of a prompt, with the first observation at the end of the last one."""
    *before, last = prompt.messages
    asked = f"{last['content']}\n\n{observation}" if last.get("content") else observation
    return (*before, Message(**{**last, "content": asked}))


class Refusals:
    """Counts the answers of one episode that are no action. Too many of them end it `truncated`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0

    def refuse(self, answer: str, why: str) -> StepResult:
        """The response to such an answer: the policy reads `why`."""
        self._count += 1
        hopeless = self._count >= self._most
        return StepResult(
            done=False,
            messages=(Message(role="user", content=why),),
            status=Status.TRUNCATED if hopeless else Status.OK,
            error=f"{self._count} answers without an action" if hopeless else "",
            answer=answer,
        )


__all__ = ["Refusals", "opening", "seed_of"]
