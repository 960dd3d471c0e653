"""Answers to many prompts: `hone generate` and `hone.generate`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hone.config import ConfigError
from hone.envs.episode import request_seed
from hone.models.settings import ModelConfig
from hone.trainers.answering.model import Answering, AnsweringModel, answering
from hone.trainers.run.event_loop import EventLoop
from hone.types import Message

OnAnswer = Callable[[int, int, str], None]
"""Called with the number of the prompt, the number of the sample, and the answer, in the order in which they end."""


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """Conversations that each get `samples` answers, and how they are sampled."""

    conversations: Sequence[Sequence[Message]]
    how: Answering
    samples: int = 1
    seed: int = 0
    folder: Path = Path()  # where paths of images begin


def generate_answers(model: ModelConfig, request: AnswerRequest, on_answer: OnAnswer | None = None) -> list[list[str]]:
    """The decoded answers to each conversation, in order."""
    loop = EventLoop()
    try:
        with answering(model, request.how, loop) as one:
            return loop.run(_all(one, request, on_answer))
    finally:
        loop.close()


async def _all(model: AnsweringModel, request: AnswerRequest, on_answer: OnAnswer | None) -> list[list[str]]:
    async def one(number: int, sample: int) -> str:
        seed = request_seed(request.seed, 0, number, sample, 0)
        try:
            asked = model.request(request.conversations[number], seed, request.folder)
            answer = model.renderer.decode((await model.whole(asked)).token_ids)
        except ValueError as error:
            raise ConfigError(f"prompt {number}: {error}") from error
        if on_answer is not None:
            on_answer(number, sample, answer)
        return answer

    answers = [
        asyncio.gather(*(one(number, sample) for sample in range(request.samples)))
        for number in range(len(request.conversations))
    ]
    return [list(one) for one in await asyncio.gather(*answers)]
