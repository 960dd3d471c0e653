"""`hone chat`: a conversation with one model, or with two that answer the same messages.

line --> user's turn of every conversation --> answers grow together --> assistant's turns
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from hone.models.settings import ModelConfig
from hone.trainers.answering.model import Answering, AnsweringModel, answering
from hone.trainers.run.event_loop import EventLoop
from hone.types import Message

OnText = Callable[[str, str], None]
"""Called with the name of a model and the new part of its answer."""


@dataclass(slots=True)
class Conversation:
    """The messages to and from one model."""

    model: AnsweringModel
    messages: list[Message] = field(default_factory=list)


class Chat:
    """Conversations with models by name, which get the same messages."""

    def __init__(self, models: Mapping[str, AnsweringModel], loop: EventLoop, system: str, seed: int) -> None:
        self._conversations = {name: Conversation(model) for name, model in models.items()}
        self._loop = loop
        self._seeds = itertools.count(seed)
        self.begin(system)

    def begin(self, system: str) -> None:
        """Begin anew, with a system prompt; empty: the chat template's own."""
        self.system = system
        for one in self._conversations.values():
            one.messages[:] = [Message(role="system", content=system)] if system else []

    def say(self, text: str, on_text: OnText) -> None:
        """Add the user's message, and every model's answer to it.

        An interrupt ends the answers, and removes the message from the conversation. Raises RenderingError and
        PromptTooLong.
        """
        before = {name: len(one.messages) for name, one in self._conversations.items()}
        try:
            self._loop.run(self._answered(text, next(self._seeds), on_text))
        except BaseException:
            for name, one in self._conversations.items():
                del one.messages[before[name] :]
            raise

    async def _answered(self, text: str, seed: int, on_text: OnText) -> None:
        answers = [asyncio.create_task(self._answer(name, text, seed, on_text)) for name in self._conversations]
        try:
            await asyncio.gather(*answers)
        finally:  # where one model fails, the others must not answer into the next turn
            for one in answers:
                one.cancel()
            await asyncio.gather(*answers, return_exceptions=True)

    async def _answer(self, name: str, text: str, seed: int, on_text: OnText) -> None:
        one = self._conversations[name]
        one.messages.append(Message(role="user", content=text))
        request, answer = one.model.request(one.messages, seed), ""
        async for more in one.model.growing(request):
            answer += more
            on_text(name, more)
        one.messages.append(Message(role="assistant", content=answer))


@contextmanager
def chatting(models: Mapping[str, ModelConfig], how: Answering, system: str, seed: int) -> Iterator[Chat]:
    """A chat with models, loaded for the block. Raises as `answering`."""
    loop = EventLoop()
    try:
        with ExitStack() as stack:
            loaded = {name: stack.enter_context(answering(model, how, loop)) for name, model in models.items()}
            yield Chat(loaded, loop, system, seed)
    finally:
        loop.close()
