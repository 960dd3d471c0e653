"""Answers of a policy that are no action of its environment."""

from __future__ import annotations

from hone.envs.base import StepResult
from hone.types import Message, Status


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


__all__ = ["Refusals"]
