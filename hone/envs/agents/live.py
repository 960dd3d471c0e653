"""Answers while they are sampled, for people who wait for them: `hone chat`, `hone serve`.

    request --8 tokens--> engine --> the answer so far, its text --> the next 8 tokens continue it ... to its end

Each piece is a request of its own that continues the tokens before it, so every rollout engine streams without a
protocol for it; engines keep the KV of what they have read. A run that trains never streams: its answers are whole.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from hone.envs.agents.protocol import ChatRequest, TextRequest
from hone.types import Completion, GenerateFn, GenerationRequest, PromptTooLong, StopReason

T = TypeVar("T")
PIECE_TOKENS = 8
HALF = "\ufffd"  # of a character whose other tokens are not there yet


async def in_pieces(generate: GenerateFn, request: GenerationRequest) -> AsyncIterator[Completion]:
    """The answer to a request, again and again with more tokens, until it is whole.

    Every piece has a seed of its own. Raises as `generate` does.
    """
    sampling, number = request.sampling, 0
    so_far = Completion(request.id, (), (), (), StopReason.LENGTH)
    while True:
        left = sampling.max_tokens - len(so_far.token_ids)
        own = replace(sampling, max_tokens=min(PIECE_TOKENS, left), seed=sampling.seed + number, keep_kv=True)
        tokens = (*request.tokens, *so_far.token_ids)
        try:
            piece = await generate(replace(request, id=f"{request.id}+{number}", tokens=tokens, sampling=own))
        except PromptTooLong:
            if not number:
                raise
            return  # the last piece ended exactly at the end of the context
        so_far = Completion(
            request.id,
            so_far.token_ids + piece.token_ids,
            so_far.logprobs + piece.logprobs,
            so_far.weight_versions + piece.weight_versions,
            piece.stop_reason,
        )
        yield so_far
        goes_on = piece.stop_reason is StopReason.LENGTH and len(piece.token_ids) == own.max_tokens < left
        if not goes_on:
            return
        number += 1


class GrowingText:
    """The text of an answer that grows by tokens; half a character waits for the rest of it."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self.whole = ""
        self.begun = False

    def grown(self, answer: Completion) -> str:
        """The text that is new in a longer answer."""
        self.begun = True
        text = self._decode(answer.token_ids)
        text = text if answer.stop_reason is StopReason.STOP else text.rstrip(HALF)
        if not text.startswith(self.whole):  # the decoder changed earlier text: the rest goes out when the answer ends
            return ""
        new, self.whole = text[len(self.whole) :], text
        return new


async def begun(stream: AsyncIterator[T]) -> AsyncIterator[T]:
    """A stream whose first item is there, so that a refused request raises here."""
    first = await anext(stream)

    async def all_of_it() -> AsyncIterator[T]:
        yield first
        async for one in stream:
            yield one

    return all_of_it()


def is_plain(body: ChatRequest | TextRequest) -> bool:
    """Return whether a request wants a stream of text that nothing can change afterwards: no tools, no stop strings."""
    if not isinstance(body, ChatRequest) or not body.stream:
        return False
    return not (body.offered or body.stops or body.json_schema or body.logprobs or (body.n or 1) > 1)


__all__ = ["PIECE_TOKENS", "GrowingText", "begun", "in_pieces", "is_plain"]
