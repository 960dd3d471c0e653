"""The plain environment: one question, one answer, judged by the reward afterwards."""

from __future__ import annotations

from hone.envs.base import StepResult
from hone.types import Completion, Prompt


class ChatEnv:
    """Single turn: the first completion ends the episode."""

    def __init__(self, prompt: Prompt, sample: int) -> None:
        self._prompt = prompt

    async def start(self) -> tuple[int, ...]:
        return self._prompt.token_ids

    async def step(self, completion: Completion, text: str) -> StepResult:
        return StepResult(done=True)

    async def close(self) -> None:
        return None
