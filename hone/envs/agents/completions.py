"""OpenAI's Chat Completions (`/v1/chat/completions`) and Completions (`/v1/completions`).

Fields without effect on tokens (`user`, `metadata` and the like) are ignored, and so is `seed`, because the run chooses
the seeds. Fields that would change an answer are refused unless they have their neutral value.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

from hone.envs.agents.images import content_of
from hone.envs.agents.live import GrowingText
from hone.envs.agents.protocol import (
    Answer,
    ChatRequest,
    Echo,
    Reply,
    TextRequest,
    event,
    openai_error,
    pieces,
    schema_of,
    supported,
)
from hone.envs.base import Language
from hone.types import Completion, StopReason

NEUTRAL: Mapping[str, tuple[Any, ...]] = {  # supported only at their neutral value
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "top_logprobs": (None, 0),
    "modalities": (None, ["text"]),
    "reasoning_effort": (None,),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "best_of": (None, 1),
    "suffix": (None, ""),
}
WITHOUT_EFFECT = frozenset(
    (
        "user",
        "metadata",
        "store",
        "service_tier",
        "seed",
        "parallel_tool_calls",
        "prompt_cache_key",
        "safety_identifier",
    )
)
FINISH = {StopReason.STOP: "stop", StopReason.LENGTH: "length"}


class ChatCompletions:
    """`POST /v1/chat/completions`."""

    error = staticmethod(openai_error)

    def read(self, data: Any) -> ChatRequest:
        fields = supported(data, NEUTRAL, WITHOUT_EFFECT)
        if isinstance(messages := fields.get("messages"), list):
            fields["messages"] = [_message(one) for one in messages]
        schema = schema_of(fields.pop("response_format", None), "response_format", "json_schema")
        return ChatRequest(json_schema=schema, **fields)

    def whole(self, reply: Reply) -> dict[str, Any]:
        choices = [
            {**_choice(reply, index), "message": answer.message, "logprobs": _chat_logprobs(answer)}
            for index, answer in enumerate(reply.answers)
        ]
        return {**self._head(reply, "chat.completion"), "choices": choices, "usage": _usage(reply)}

    def stream(self, reply: Reply) -> Iterator[str]:
        head = self._head(reply, "chat.completion.chunk")
        for index, answer in enumerate(reply.answers):
            for delta in _deltas(answer):
                yield _chunk(head, index, delta)
            yield _last_chunk(head, reply, index)
        yield from _ends(reply, head)

    async def live(self, reply: Reply, language: Language, answered: AsyncIterator[Completion]) -> AsyncIterator[str]:
        """Server-sent events of an answer that is still being sampled; `reply` has no answers yet."""
        head = self._head(reply, "chat.completion.chunk")
        text, whole = GrowingText(language.decode), None
        async for whole in answered:
            if not text.begun:
                yield _chunk(head, 0, {"role": "assistant", "content": ""})
            if more := text.grown(whole):
                yield _chunk(head, 0, {"content": more})
        assert whole is not None
        done = replace(reply, answers=[Answer(whole, text.whole)])
        yield _last_chunk(head, done, 0)
        for one in _ends(done, head):
            yield one

    def _head(self, reply: Reply, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{reply.id}", "object": kind, "created": int(time.time()), "model": reply.model}


class TextCompletions:
    """`POST /v1/completions`."""

    error = staticmethod(openai_error)

    def read(self, data: Any) -> TextRequest:
        return TextRequest(**supported(data, {**NEUTRAL, "response_format": (None,)}, WITHOUT_EFFECT))

    def whole(self, reply: Reply) -> dict[str, Any]:
        choices = [
            {**_choice(reply, index), "text": _text(reply, answer), "logprobs": _text_logprobs(reply, answer)}
            for index, answer in enumerate(reply.answers)
        ]
        return {**self._head(reply, "text_completion"), "choices": choices, "usage": _usage(reply)}

    def stream(self, reply: Reply) -> Iterator[str]:
        head = self._head(reply, "text_completion")
        for index, answer in enumerate(reply.answers):
            for piece in pieces(_text(reply, answer)):
                choice = {"index": index, "finish_reason": None, "logprobs": None, "text": piece}
                yield event({**head, "choices": [choice]})
            last = {**_choice(reply, index), "text": "", "logprobs": _text_logprobs(reply, answer)}
            yield event({**head, "choices": [last]})
        yield from _ends(reply, head)

    def _head(self, reply: Reply, kind: str) -> dict[str, Any]:
        return {"id": f"cmpl-{reply.id}", "object": kind, "created": int(time.time()), "model": reply.model}


def _message(message: Any) -> Any:
    """A message whose content is a text, or has images; messages without content are left as they are."""
    if not isinstance(message, dict) or message.get("content") is None:
        return message
    return {**message, "content": content_of(message["content"], message.get("role"), ("text",), "image_url")}


def _chunk(head: Mapping[str, Any], index: int, delta: Mapping[str, Any]) -> str:
    choice = {"index": index, "finish_reason": None, "logprobs": None, "delta": delta}
    return event({**head, "choices": [choice]})


def _last_chunk(head: Mapping[str, Any], reply: Reply, index: int) -> str:
    last = {**_choice(reply, index), "delta": {}, "logprobs": _chat_logprobs(reply.answers[index])}
    return event({**head, "choices": [last]})


def _choice(reply: Reply, index: int) -> dict[str, Any]:
    """Return the fields that a choice has in every form."""
    answer = reply.answers[index]
    reason = "tool_calls" if answer.tool_calls else FINISH[answer.completion.stop_reason]
    return {"index": index, "finish_reason": reason, **reply.sampled(answer)}


def _deltas(answer: Answer) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": ""}
    yield from ({"content": piece} for piece in pieces(answer.text))
    for number, call in enumerate(answer.tool_calls):
        yield {"tool_calls": [{"index": number, **call}]}


def _ends(reply: Reply, head: Mapping[str, Any]) -> Iterator[str]:
    if (reply.request.stream_options or {}).get("include_usage"):
        yield event({**head, "choices": [], "usage": _usage(reply)})
    yield "data: [DONE]\n\n"


def _usage(reply: Reply) -> dict[str, int]:
    told = reply.sampled_tokens
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": told,
        "total_tokens": reply.prompt_tokens + told,
    }


def _chat_logprobs(answer: Answer) -> dict[str, Any] | None:
    if not answer.tokens:
        return None
    pairs = zip(answer.tokens, answer.completion.logprobs, strict=True)
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in pairs
        ],
        "refusal": None,
    }


def _text(reply: Reply, answer: Answer) -> str:
    return answer.text if reply.echo is None else reply.echo.text + answer.text


def _text_logprobs(reply: Reply, answer: Answer) -> dict[str, Any] | None:
    echo = reply.echo or Echo("")
    tokens = [*echo.tokens, *answer.tokens]
    if not tokens:
        return None
    return {
        "tokens": tokens,
        "token_logprobs": [*echo.logprobs, *answer.completion.logprobs],
        "top_logprobs": None if echo.top is None else [*echo.top, *(None for _ in answer.tokens)],
        "text_offset": [0, *accumulate(map(len, tokens[:-1]))],
    }


__all__ = ["ChatCompletions", "TextCompletions"]
