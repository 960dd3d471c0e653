"""The default environment: one question, one answer; the reward scores it afterwards."""

from __future__ import annotations

from hone.envs.base import Start, StepResult
from hone.envs.settings import EpisodeConfig
from hone.envs.tool_calls import Said
from hone.types import Completion, Prompt


class ChatEnv:
    """A single turn: the first completion ends the episode."""

    single_turn = True

    def __init__(self, prompt: Prompt, sample: int, settings: EpisodeConfig) -> None:
        self._prompt = prompt

    async def start(self) -> Start:
        return Start(token_ids=self._prompt.token_ids)

    async def step(self, said: Said, completion: Completion) -> StepResult:
        return StepResult(done=True)

    async def close(self) -> None:
        return None
