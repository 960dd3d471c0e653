"""The OpenAI protocol as data: request fields, and the form of answers, streams and errors.

A request for something that hone cannot do is refused with the name of its field. Ignored are only fields that change
no token (`user`, `metadata` and the like) and `seed`, because the run chooses the seeds.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hone.types import Completion, SamplingParams, StopReason

NEUTRAL: Mapping[str, tuple[Any, ...]] = {  # supported only at their neutral value
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
    "top_logprobs": (None, 0),
    "modalities": (None, ["text"]),
    "reasoning_effort": (None,),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "tool_choice": (None, "auto", "none"),
    "echo": (None, False),
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
PIECE = 24  # characters per chunk of a stream
FINISH = {StopReason.STOP: "stop", StopReason.LENGTH: "length"}


class BadRequest(ValueError):
    """A request that cannot be served; `code` is for programs."""

    def __init__(self, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.code = code


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = ""
    max_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(1, ge=1, le=128)
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    return_token_ids: bool = False

    @property
    def longest(self) -> int | None:
        return self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))

    def sampling(self, of_run: SamplingParams, budget: int, own: bool) -> SamplingParams:
        """Return the run's sampling with this request's length and stop strings; if `own`, also its temperature, ..."""
        chosen = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        changes: dict[str, Any] = {key: value for key, value in chosen.items() if value is not None} if own else {}
        return replace(
            of_run,
            max_tokens=min(self.longest or budget, budget),
            stop=tuple(dict.fromkeys((*of_run.stop, *self.stops))),
            **changes,
        )


class ChatRequest(_Request):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | None = None
    logprobs: bool | None = False
    max_completion_tokens: int | None = Field(None, ge=1)

    @property
    def longest(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def offered(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else self.tools or []


class TextRequest(_Request):
    """`POST /v1/completions`; the prompt is either text or token ids."""

    prompt: str | list[int] | list[str]
    logprobs: Literal[0, 1] | None = None

    @property
    def only_prompt(self) -> str | list[int]:
        if isinstance(self.prompt, list) and self.prompt and isinstance(self.prompt[0], str):
            if len(self.prompt) > 1:
                raise BadRequest("one prompt in a request: an agent's requests are recorded in their order")
            return str(self.prompt[0])
        if not self.prompt:
            raise BadRequest("the prompt is empty")
        return self.prompt  # type: ignore[return-value]


def supported(body: Any) -> dict[str, Any]:
    """Return the supported fields of a request. Raises BadRequest for a field that asks for something unsupported."""
    if not isinstance(body, dict):
        raise BadRequest(f"a request is a JSON object, found {body!r:.60}")
    for name, allowed in NEUTRAL.items():
        if body.get(name) not in allowed:
            raise BadRequest(f"{name} = {body[name]!r:.80} is not supported; leave it out", "unsupported")
    dropped = WITHOUT_EFFECT | (NEUTRAL.keys() - {"tool_choice"})
    return {key: value for key, value in body.items() if key not in dropped}


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice of a reply: the text without stop string and tool calls, and what was sampled."""

    completion: Completion
    text: str
    tool_calls: tuple[dict[str, Any], ...] = ()
    tokens: tuple[str, ...] = ()  # the text of each sampled token, if log-probs were asked for

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if self.tool_calls else FINISH[self.completion.stop_reason]

    @property
    def message(self) -> dict[str, Any]:
        told: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.tool_calls:
            told |= {"content": self.text or None, "tool_calls": list(self.tool_calls)}
        return told

    def chat_logprobs(self) -> dict[str, Any] | None:
        if not self.tokens:
            return None
        pairs = zip(self.tokens, self.completion.logprobs, strict=True)
        return {
            "content": [
                {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                for text, logprob in pairs
            ],
            "refusal": None,
        }

    def text_logprobs(self) -> dict[str, Any] | None:
        if not self.tokens:
            return None
        offsets = [sum(map(len, self.tokens[:place])) for place in range(len(self.tokens))]
        return {
            "tokens": list(self.tokens),
            "token_logprobs": list(self.completion.logprobs),
            "top_logprobs": None,
            "text_offset": offsets,
        }


@dataclass(frozen=True, slots=True)
class Reply:
    """All answers to one request; can be written whole or as a stream."""

    model: str
    answers: Sequence[Answer]
    prompt_tokens: int
    chat: bool
    token_ids: bool  # include ids and weight versions

    @property
    def usage(self) -> dict[str, int]:
        told = sum(len(answer.completion.token_ids) for answer in self.answers)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": told,
            "total_tokens": self.prompt_tokens + told,
        }

    def whole(self) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(self.answers):
            choice: dict[str, Any] = {"index": index, "finish_reason": answer.finish_reason, **self._extra(answer)}
            if self.chat:
                choice |= {"message": answer.message, "logprobs": answer.chat_logprobs()}
            else:
                choice |= {"text": answer.text, "logprobs": answer.text_logprobs()}
            choices.append(choice)
        return {**self._head("chat.completion"), "choices": choices, "usage": self.usage}

    def stream(self, with_usage: bool) -> Iterator[str]:
        """Yield server-sent events of a complete answer, so the client receives exactly what is recorded."""
        head = self._head("chat.completion.chunk")
        for index, answer in enumerate(self.answers):
            for change in self._pieces(answer):
                yield _event({**head, "choices": [{"index": index, "finish_reason": None, "logprobs": None, **change}]})
            last: dict[str, Any] = {"index": index, "finish_reason": answer.finish_reason, **self._extra(answer)}
            last |= {"delta": {}, "logprobs": answer.chat_logprobs()} if self.chat else {"text": ""}
            last.setdefault("logprobs", answer.text_logprobs())
            yield _event({**head, "choices": [last]})
        if with_usage:
            yield _event({**head, "choices": [], "usage": self.usage})
        yield "data: [DONE]\n\n"

    def _pieces(self, answer: Answer) -> Iterator[dict[str, Any]]:
        pieces = [answer.text[start : start + PIECE] for start in range(0, len(answer.text), PIECE)]
        if not self.chat:
            yield from ({"text": piece} for piece in pieces)
            return
        yield {"delta": {"role": "assistant", "content": ""}}
        yield from ({"delta": {"content": piece}} for piece in pieces)
        for number, call in enumerate(answer.tool_calls):
            yield {"delta": {"tool_calls": [{"index": number, **call}]}}

    def _head(self, kind: str) -> dict[str, Any]:
        name, mark = (kind, "chatcmpl") if self.chat else ("text_completion", "cmpl")
        return {
            "id": f"{mark}-{uuid.uuid4().hex}",
            "object": name,
            "created": int(time.time()),
            "model": self.model or "policy",
        }

    def _extra(self, answer: Answer) -> dict[str, Any]:
        if not self.token_ids:
            return {}
        return {
            "token_ids": list(answer.completion.token_ids),
            "weight_versions": list(answer.completion.weight_versions),
        }


def error_body(message: str, kind: str, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _event(data: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


__all__ = ["Answer", "BadRequest", "ChatRequest", "Reply", "TextRequest", "error_body", "supported"]
